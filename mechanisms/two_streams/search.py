"""Which way of running a step is the fastest: a profile of its layers, and a short search, in the first steps.

The profile is that of Algorithm 1 (Oh et al. 2022, section 4.1). On a CPU, whose streams have cores of their own, a
layer is a region: weight gradients go to the sub-stream greedily, by how much time of the main stream they free. CUDA's
streams share the device, and have :class:`retime.mechanisms.two_streams.regions.RegionProfile`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from retime.foundations.streams import has_streams
from retime.mechanisms.two_streams.layers import Kernels, SplitLayer
from retime.mechanisms.two_streams.sub_stream import Job

BLOCK_STEPS = 4
"""Steps in a row with one setting; the first of them is not counted."""
ROUNDS = 2
PROFILE_STEPS = 5
HAND_OVER_S = 0.2e-3
"""What it costs the main stream of a CPU to give a weight gradient away: 0.13 to 0.30 ms on two cores of a Xeon, with
64 layers of width 4 (torch 2.13), most of it Python's lock, which changes hands."""
LEAST_GAIN = 1.01
"""By so much two streams have to be faster than a plain step to be worth their memory."""
STEPS_TO_SECOND_LOOK = 100
"""After a search on a CPU that kept two streams: others may have used the cores while it lasted."""


@dataclass(frozen=True)
class Setting:
    """Way to run a step.

    Args:
        two_streams: whether weight gradients run on the sub-stream.
        forward_threads: of each kernel of the forward pass, on a CPU; 0: as it is.
        main_threads: of each kernel of the backward pass's main stream.
        sub_threads: of each kernel of the sub-stream.
        graph: whether parts of the model are replayed as CUDA graphs.
        layers: names of those whose weight gradients run on the sub-stream; None: of all that can.
        places: on CUDA, names of layers whose weight gradients wait, each with that of the layer whose output gradient
            they wait for; all others run as soon as they are ready.
    """

    two_streams: bool
    forward_threads: int = 0
    main_threads: int = 0
    sub_threads: int = 0
    graph: bool = False
    layers: frozenset[str] | None = None
    places: frozenset[tuple[str, str]] = frozenset()

    def __str__(self) -> str:
        if self.graph:
            return f"{'two streams' if self.two_streams else 'one stream'} in a graph"
        if not self.two_streams:
            many = "s" if self.forward_threads > 1 else ""
            return "plain" + (f" with {self.forward_threads} thread{many}" if self.forward_threads else "")
        few = "" if self.layers is None else f" for {len(self.layers)} layer{'s' * (len(self.layers) > 1)}"
        if not self.forward_threads:
            return f"two streams{few}" + (f", {len(self.places)} of them in later regions" if self.places else "")
        return f"two streams{few} with {self.main_threads} + {self.sub_threads} threads, {self.forward_threads} forward"


def settings_for(device: torch.device, threads: int, *, graph: bool = False) -> list[Setting]:
    """Return what to try on this device, the plain step first.

    On a CPU the threads of a kernel are halved too: with kernels too small for all cores a plain step may be faster
    with fewer, and two streams are to be compared with the best plain one.

    Args:
        threads: that kernels have on a CPU.
    """
    if has_streams(device):
        return [Setting(two, graph=one) for one in ((False, True) if graph else (False,)) for two in (False, True)]
    plain = Setting(False, threads, threads)
    if threads < 2:
        return [plain]
    half = threads // 2
    return [
        plain,
        Setting(False, half, half),
        Setting(True, threads, threads - half, half),
        Setting(True, half, threads - half, half),
    ]


def with_layers(settings: Iterable[Setting], names: Iterable[str] | None) -> list[Setting]:
    """Return the settings, of which those with two streams give only these layers' weight gradients away."""
    layers = None if names is None else frozenset(names)
    return [replace(one, layers=layers) if one.two_streams else one for one in settings]


@dataclass
class LayerTimes:
    """Seconds of one layer's gradients on one stream, a value a call in a backward pass.

    Args:
        output: of the output gradient, by itself; empty where no input needs a gradient.
        weight: of the weight gradients, by themselves.
        both: of all of them in one call, as torch's own node has them; empty where ``output`` is.
    """

    output: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)


class _TimedKernels:
    """A layer's kernels, of which the gradients' are timed; a weight gradient comes before its output gradient."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.arguments = kernels, kernels.arguments
        self.forward = kernels.forward
        self.both = kernels.both
        self.times = LayerTimes()
        self.is_wanted = False
        """Whether this call's weight gradient could be given away."""
        self._needs = (True, True)

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        self._needs = needs_weight, needs_bias
        return self._timed("weight", self.kernels.weight_gradients, gradient, x, weight, needs_weight, needs_bias)  # type: ignore[no-any-return]

    def output_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = self._timed("output", self.kernels.output_gradient, gradient, x, weight)
        if self.is_wanted:
            self._timed("both", self.kernels.both, gradient, x, weight, *self._needs)
        self.is_wanted = False
        return output

    def _timed(self, what: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        if not self.is_wanted:
            return compute(*arguments)
        began = time.perf_counter()
        gradients = compute(*arguments)
        getattr(self.times, what).append(time.perf_counter() - began)
        return gradients


class Profile:
    """Times the gradients of each layer in a few steps in which all of them run on the main stream of a CPU.

    Args:
        layers: of the model; their kernels are timed until :meth:`end`.
    """

    def __init__(self, layers: Iterable[SplitLayer]) -> None:
        self._timed = {layer: _TimedKernels(layer.kernels) for layer in layers}
        for layer, timed in self._timed.items():
            layer.kernels = timed
        self._steps = 0
        self._began = 0.0
        self._backward_s: list[float] = []

    def next_step(self) -> bool:
        """Say that a step begins; False: it is no longer one of the profile's."""
        self._steps += 1
        return self._steps <= PROFILE_STEPS

    def setting(self, setting: Setting) -> Setting:
        """Return how the step that begins is run, given the setting with two streams."""
        return setting

    def begin_backward(self) -> None:
        """The first weight gradient of a backward pass is about to be computed."""
        self._began = time.perf_counter()

    def end_backward(self) -> None:
        """A backward pass is at its end."""
        self._backward_s.append(time.perf_counter() - self._began)

    def want(self, layer: SplitLayer, job: Job) -> bool:
        """The gradients that this layer computes next could run apart; return whether they are to."""
        self._timed[layer].is_wanted = True
        return False

    def end(self, settings: Sequence[Setting]) -> list[Setting]:
        """Time no more, and return the settings with the layers whose weight gradients are worth giving away."""
        for layer, timed in self._timed.items():
            if layer.kernels is timed:
                layer.kernels = timed.kernels
        times = {layer.name: timed.times for layer, timed in self._timed.items() if timed.times.weight}
        passes = max(1, len(self._backward_s))
        in_layers_s = sum(sum(one.output) + sum(one.weight) + sum(one.both) for one in times.values())
        names, sub_share = layers_to_give(times, passes, (sum(self._backward_s) - in_layers_s) / passes)
        return with_layers([_split(one, sub_share) for one in settings], names) if names else list(settings)


def _split(setting: Setting, sub_share: float) -> Setting:
    """Return a setting whose sub-stream has this share of the cores, and one at least; so has the main stream."""
    threads = setting.main_threads + setting.sub_threads
    if not setting.two_streams:
        return setting
    sub = min(max(1, round(threads * sub_share)), threads - 1)
    return replace(setting, main_threads=threads - sub, sub_threads=sub)


def layers_to_give(times: Mapping[str, LayerTimes], passes: int, rest_s: float) -> tuple[list[str], float]:
    """Choose whose weight gradients go to the sub-stream (Algorithm 1: greedily, by the highest speedup).

    One that goes takes its time on the sub-stream, and frees what its layer takes on the main stream above the output
    gradient alone (less than that time, where torch computes both in one call faster than apart) and
    :data:`HAND_OVER_S`. The next one goes as long as this shortens the backward pass, at whose end the main stream
    takes over half of what the sub-stream has left.

    Args:
        passes: backward passes that were timed.
        rest_s: of a backward pass, outside of these layers.

    Returns:
        Their names, and the share of the backward pass's work that they take to the sub-stream.
    """
    sub_s, main_s = 0.0, rest_s
    worth: list[tuple[float, str, float, float]] = []
    for name, one in times.items():
        calls = len(one.weight) / passes
        weight_s = calls * statistics.median(one.weight)
        both_s = calls * statistics.median(one.both) if one.both else weight_s
        freed_s = both_s - calls * (HAND_OVER_S + (statistics.median(one.output) if one.output else 0.0))
        main_s += both_s
        if freed_s > 0:
            worth.append((freed_s / weight_s, name, weight_s, freed_s))
    names, shortest_s = [], main_s
    for _, name, weight_s, freed_s in sorted(worth, reverse=True):
        main_then_s, sub_then_s = main_s - freed_s, sub_s + weight_s
        length_s = max(main_then_s, (main_then_s + sub_then_s) / 2)
        if length_s < shortest_s:
            main_s, sub_s, shortest_s = main_then_s, sub_then_s, length_s
            names.append(name)
    return names, sub_s / (main_s + sub_s or 1.0)


class Search:
    """Goes through settings, some steps each, round by round.

    A step is the time between the beginnings of two forward passes, so that it has everything that a step has.

    Args:
        settings: the plain one first.
        device: waited for at the beginning of each step while the search lasts, if it is a CUDA device.
    """

    def __init__(self, settings: list[Setting], device: torch.device) -> None:
        self._device = device
        self._order = [setting for _ in range(ROUNDS) for setting in settings for _ in range(BLOCK_STEPS)]
        self._step = 0
        self._began: float | None = None
        self.times_ms: dict[Setting, list[float]] = {setting: [] for setting in settings}

    def next_step(self) -> Setting | None:
        """Say that a step begins.

        Returns:
            Its setting; None: the search has ended.
        """
        if has_streams(self._device):
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._began is not None:
            if self._step % BLOCK_STEPS:
                self.times_ms[self._order[self._step]].append((now - self._began) * 1000)
            self._step += 1
        self._began = now
        return self._order[self._step] if self._step < len(self._order) else None

    def medians_ms(self) -> dict[Setting, float]:
        """Return the median step of each setting."""
        return {setting: statistics.median(times) for setting, times in self.times_ms.items() if times}

    def best(self) -> Setting:
        """Return the fastest setting.

        A plain one stays unless two streams, or a graph, are faster than the fastest plain one by :data:`LEAST_GAIN` in
        every round, and the first plain one unless another is faster than it by as much in every round.
        """
        medians, plain = self.medians_ms(), self.best_plain()
        first = next(iter(medians))
        others = [one for one in medians if (one.two_streams or one.graph) and self._is_faster(one, plain, LEAST_GAIN)]
        if others:
            return min(others, key=medians.__getitem__)
        return plain if self._is_faster(plain, first, LEAST_GAIN) else first

    def best_plain(self) -> Setting:
        """Return the fastest setting without two streams and graphs."""
        medians = self.medians_ms()
        return min((one for one in medians if not (one.two_streams or one.graph)), key=medians.__getitem__)

    def second_look(self) -> Setting:
        """Return the setting with two streams rather than the plain one, unless it is slower in every round."""
        plain, two_streams = self.times_ms
        return plain if self._is_faster(plain, two_streams, 1.0) else two_streams

    def _is_faster(self, setting: Setting, other: Setting, gain: float) -> bool:
        """Return whether it is in every round: what a busy machine does to one of them does not decide."""
        rounds = zip(self._rounds_ms(setting), self._rounds_ms(other), strict=True)
        return all(other_ms >= gain * ms for ms, other_ms in rounds)

    def _rounds_ms(self, setting: Setting) -> list[float]:
        times, counted = self.times_ms[setting], BLOCK_STEPS - 1
        return [statistics.median(times[start : start + counted]) for start in range(0, len(times), counted)]
