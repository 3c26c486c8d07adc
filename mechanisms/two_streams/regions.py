"""Where weight gradients run on CUDA: multi-region joint scheduling (Oh et al. 2022, section 4.1, Algorithm 1).

The backward pass is cut into regions. A few steps of training, whose weight gradients are held back for more and more
regions, show how fast each region and each region's weight gradients run together. Algorithm 1
(:func:`retime.schedules.joint_schedule`) finds the region of each weight gradient, within ``max_memory`` by
pre-scheduling. The next forward pass has none: it begins behind ``optimizer.step()``, which needs all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from retime import schedules
from retime.mechanisms.two_streams.layers import SplitLayer
from retime.mechanisms.two_streams.search import LEAST_GAIN, Setting
from retime.mechanisms.two_streams.sub_stream import Job
from retime.schedules import Buffer, Kind, ScheduleError, Task

REGIONS = 4
"""As many as DenseNet-121 has dense blocks, and so regions of its backward pass, in section 4.1."""
END = ""
"""Place of weight gradients that wait until the backward pass is at its end; no layer to wait for has this name."""


@dataclass
class StepTimes:
    """Milliseconds of one backward pass, from its first layer's gradient on.

    Args:
        begin: when the main stream came to each layer's gradients, in that order.
        end: when it was at its end.
        sub: when each layer's weight gradients began and ended on the sub-stream.
    """

    begin: dict[str, float] = field(default_factory=dict)
    end: float = 0.0
    sub: dict[str, tuple[float, float]] = field(default_factory=dict)


class RegionProfile:
    """Profile of regions in :attr:`STEPS` steps: one warms up, one has all weight gradients at its end.

    In those behind, each region's weight gradients run beside it, then beside the next region, and so on.

    Args:
        device: a CUDA device.
        most_bytes: that may wait, as ``max_memory``; None: any number.
    """

    STEPS = 2 + REGIONS

    def __init__(self, device: torch.device, most_bytes: int | None = None) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._step = -1
        self._times: list[StepTimes] = []
        self._begin: dict[str, torch.cuda.Event] = {}
        self._sub: dict[str, list[torch.cuda.Event]] = {}
        self._end: torch.cuda.Event | None = None
        self._sizes: dict[str, int] = {}
        self._regions: list[list[str]] = []

    def next_step(self) -> bool:
        """Say that a step begins; False: it is no longer one of the profile's."""
        self._read()
        self._step += 1
        if self._step == 2:
            self._regions = cut(self._times[1])
        return self._step < self.STEPS

    def setting(self, setting: Setting) -> Setting:
        """Return how the step that begins is run, given the setting with two streams."""
        if self._step < 2:
            return replace(setting, places=frozenset((name, END) for name in self._known()))
        later = self._step - 2
        places = {
            (name, self._regions[region + later][0] if region + later < len(self._regions) else END)
            for region, names in enumerate(self._regions)
            for name in names
            if later
        }
        return replace(setting, places=frozenset(places))

    def begin_backward(self) -> None:
        """The first weight gradient of a backward pass is about to be computed."""

    def end_backward(self) -> None:
        """A backward pass is at its end."""
        self._end = self._recorded()

    def want(self, layer: SplitLayer, job: Job) -> bool:
        """Time what this layer computes next, and let its weight gradients run apart."""
        self._begin.setdefault(layer.name, self._recorded())
        self._sizes[layer.name] = job.size_bytes
        compute = job.compute
        assert compute is not None

        def timed() -> Sequence[torch.Tensor | None]:
            events = self._sub.setdefault(layer.name, [])
            events.append(self._recorded())
            gradients = compute()
            events.append(self._recorded())
            return gradients

        job.compute = timed
        return True

    def _known(self) -> list[str]:
        return list(self._times[0].begin) if self._times else []

    def _read(self) -> None:
        """Keep the times of the step that has ended."""
        times, first = StepTimes(), next(iter(self._begin.values()), None)
        if first is not None and self._end is not None:
            for events in (*self._sub.values(), [self._end]):
                events[-1].synchronize()
            times.begin = {name: first.elapsed_time(event) for name, event in self._begin.items()}
            times.end = first.elapsed_time(self._end)
            times.sub = {
                name: (first.elapsed_time(events[0]), first.elapsed_time(events[-1]))
                for name, events in self._sub.items()
            }
        if self._step >= 0:
            self._times.append(times)
        self._begin, self._sub, self._end = {}, {}, None

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return the settings, and two streams with the places that Algorithm 1 finds, if it finds others."""
        layers, places = places_of(self._regions, self._times[1:], self._sizes, self._most_bytes)
        some = replace(settings[-1], layers=layers, places=frozenset(places.items()))
        return [*settings, some] if layers != frozenset() and some != settings[-1] else list(settings)


def cut(times: StepTimes) -> list[list[str]]:
    """Cut a backward pass into at most :data:`REGIONS` stretches that take about as long, a layer at least each."""
    names, regions = list(times.begin), list[list[str]]()
    for number, name in enumerate(names):
        left = len(names) - number
        share = REGIONS * times.begin[name] / (times.end or 1.0)
        if not regions or share >= len(regions) or left <= REGIONS - len(regions):
            regions.append([])
        regions[-1].append(name)
    return regions


def places_of(
    regions: Sequence[Sequence[str]],
    times: Sequence[StepTimes],
    sizes: Mapping[str, int],
    most_bytes: int | None = None,
) -> tuple[frozenset[str] | None, dict[str, str]]:
    """Place weight gradients by Algorithm 1.

    Args:
        regions: names of layers, in the order of the backward pass.
        times: of a step whose weight gradients all ran at the end, and of steps in which those of each region ran
            beside that region, beside the next one, beside the second next one, and so on.
        sizes: bytes that each layer's weight gradients hold until they have run.
        most_bytes: that may be held; None: any number.

    Returns:
        Names of the layers whose weight gradients gain beside some region (None: all), and of those that wait for a
        later region, each with that region's first such layer.
    """
    order = [name for names in regions for name in names]
    if not order or any(name not in times[0].sub for name in order):
        return frozenset(), {}
    measured = _Measured(regions, times)
    gaining = [name for name in order if max(measured.speedup(name)) >= LEAST_GAIN]
    layers = None if len(gaining) == len(order) else frozenset(gaining)
    in_order = {measured.number[name] for name in order if name not in gaining}
    planned, profile = measured.planned(), measured.profile(in_order)
    try:
        if most_bytes is None:
            plan = schedules.joint_schedule(planned, profile, updates=False, without_weights=in_order)
        else:
            buffers = [
                Buffer(name, sizes[name], written_by, (Task(Kind.W, measured.number[name]),))
                for name, written_by in zip(order, [(), *((task,) for task in _output_gradients(planned))], strict=True)
                if name in gaining
            ]
            plan = schedules.joint_schedule_within(
                most_bytes, planned, profile, buffers, updates=False, without_weights=in_order
            )
    except ScheduleError:  # too few bytes for any order: then each begins as soon as it is ready
        return layers, {}
    names = {number: name for name, number in measured.number.items()}
    places = {}
    for number, tasks in enumerate(plan.sub):
        later = [name for region in regions[number:] for name in region if name in gaining]
        for name in (names[task.layer] for task in tasks):
            if number > measured.region[name]:
                places[name] = later[0] if later else END
    return layers, places


class _Measured:
    """Measurements as Algorithm 1 takes them: layers have numbers, from 1 in the order of the forward pass."""

    def __init__(self, regions: Sequence[Sequence[str]], times: Sequence[StepTimes]) -> None:
        alone, *self._beside = times
        self.regions = regions
        self.order = [name for names in regions for name in names]
        self.number = {name: len(self.order) - place for place, name in enumerate(self.order)}
        self.region = {name: number for number, names in enumerate(regions) for name in names}
        begins = [*(alone.begin[name] for name in self.order), alone.end]
        self.main_ms = {name: end - begin for name, (begin, end) in zip(self.order, pairwise(begins), strict=True)}
        self.sub_ms = {name: alone.sub[name][1] - alone.sub[name][0] for name in self.order}
        self._pairs = {
            (group, group + later): self._together(group, group + later, step)
            for later, step in enumerate(self._beside)
            for group in range(len(regions) - later)
        }

    def _together(self, group: int, region: int, step: StepTimes) -> tuple[float, float]:
        """Speedup of a region and a region's weight gradients together, and how much longer these take than alone."""
        names, following = self.regions[group], self.regions[region + 1 : region + 2]
        first, behind = self.regions[region][0], following[0][0] if following else None
        alone_ms = sum(self.sub_ms[name] for name in names)
        if not {*names} <= step.sub.keys() or not {first, behind or first} <= step.begin.keys() or alone_ms <= 0.0:
            return 0.0, 1.0
        spans = [step.sub[name] for name in names]
        main_end = step.end if behind is None else step.begin[behind]
        together_ms = max(main_end, *(end for _, end in spans)) - min(step.begin[first], *(start for start, _ in spans))
        in_turn_ms = alone_ms + sum(self.main_ms[name] for name in self.regions[region])
        return in_turn_ms / max(together_ms, 1e-9), sum(end - start for start, end in spans) / alone_ms

    def _of_pair(self, name: str, place: int) -> list[float]:
        """By region, a number of its pair with the layer's own; of a region before that, the layer's own region's."""
        own = self.region[name]
        return [self._pairs[own, max(region, own)][place] for region in range(len(self.regions))]

    def speedup(self, name: str) -> list[float]:
        """By region, of the layer's weight gradients beside it."""
        return self._of_pair(name, 0)

    def planned(self) -> list[schedules.Region]:
        """Regions of the backward pass, and one of the forward pass."""
        blocks = [[self.number[name] for name in reversed(names)] for names in reversed(self.regions)]
        both = schedules.backward_and_forward_regions(blocks)
        forward = [task for region in both[len(self.regions) :] for task in region.tasks]
        return [*both[: len(self.regions)], schedules.Region("F", tuple(forward))]

    def profile(self, in_order: Collection[int]) -> schedules.Profile:
        """``T_main``, ``T_sub`` and speedups; weight gradients in order are part of the main stream's work."""
        main_ms = {task: 0.0 for region in self.planned() for task in region.tasks}
        for name, number in self.number.items():
            main_ms[Task(Kind.O, number)] = self.main_ms[name] + (self.sub_ms[name] if number in in_order else 0.0)
        sub_ms, speedup = {}, {}
        for name, number in self.number.items():
            task = Task(Kind.W, number)
            sub_ms[task] = [*(self.sub_ms[name] * longer for longer in self._of_pair(name, 1)), math.inf]
            speedup[task] = [*self.speedup(name), 0.0]
        return schedules.Profile(main_ms, sub_ms, speedup)


def _output_gradients(planned: Sequence[schedules.Region]) -> list[Task]:
    return [task for region in planned for task in region.tasks if task.kind is Kind.O]
