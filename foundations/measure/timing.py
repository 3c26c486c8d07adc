"""Where one training step's time goes, what each layer costs, and what rounds of a measurement come to.

    timer = StepTimer("cuda")
    timer.start()
    timer.switch("forward");  loss = model(x).sum()
    timer.switch("backward"); loss.backward()
    timer.switch("update");   optimizer.step()
    timer.stop()
    print(timer.timing().metrics())

On CUDA a switch records an event on the current stream and never waits for the device, so measuring does not change
how host and device overlap; :meth:`StepTimer.timing` waits once, after the step. Elsewhere a switch reads the host's
clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retime.foundations.streams import has_streams
from retime.schedules.timeline import Span

PHASES = ("forward", "backward", "update")
OTHER = "other"
EXPOSED = "exposed communication"


@dataclass(frozen=True)
class StepTiming:
    """Times of one step's phases, in milliseconds.

    Args:
        spans: one box a stretch of a phase, in order, plus one a stretch of exposed communication. Stretches outside
            the three phases (zeroing gradients, hooks, schedulers) are the gaps between the boxes.
        step_ms: from ``start`` to ``stop``; over several batches, the sum of each batch's.
        forward_ms: total of the forward spans.
        backward_ms: total of the backward spans, exposed communication included.
        update_ms: total of the update spans.
        communication_exposed_ms: from the last gradient that this process computed to the end of its backward; 0 for
            one process; ``None`` where it cannot be told, because no parameter reported a gradient.
        clock: ``"cuda events"`` or ``"host clock"``.
    """

    spans: tuple[Span, ...]
    step_ms: float
    forward_ms: float
    backward_ms: float
    update_ms: float
    communication_exposed_ms: float | None
    clock: str

    def metrics(self) -> dict[str, float]:
        """The numbers by name; ``communication_exposed_ms`` is left out where it is unknown."""
        names = ("forward_ms", "backward_ms", "update_ms", "step_ms", "communication_exposed_ms")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class Clock:
    """Marks points in time: by CUDA events in the current stream for CUDA devices, by the host's clock for others."""

    def __init__(self, device: torch.device | str) -> None:
        self._has_events = has_streams(torch.device(device))
        self.name = "cuda events" if self._has_events else "host clock"

    def mark(self, reuse: Any = None) -> Any:
        """A point in time; ``reuse`` moves an earlier mark to now and is cheaper where marks are objects."""
        if not self._has_events:
            return time.perf_counter()
        event = reuse if reuse is not None else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # The current stream of the *calling* thread: inside the backward, autograd has made it the layer's stream.
        event.record()
        return event

    def offsets_ms(self, marks: list[Any]) -> list[float]:
        """Milliseconds from the first mark to each; on CUDA this waits for the device."""
        if not self._has_events:
            return [(mark - marks[0]) * 1000.0 for mark in marks]
        for mark in marks:
            mark.synchronize()
        return [marks[0].elapsed_time(mark) for mark in marks]


def check_phase(phase: str, running: bool) -> None:
    """Raise for a switch to no phase (ValueError), or outside a batch (RuntimeError)."""
    if phase not in (*PHASES, OTHER):
        raise ValueError(f"unknown phase {phase!r}: use one of {', '.join((*PHASES, OTHER))}")
    if not running:
        raise RuntimeError(f"switch({phase!r}) outside a batch: call start() first")


@dataclass
class _Stretch:
    """One phase from its begin mark to the next stretch's; ``last_gradient`` is set in a backward only."""

    phase: str
    begin: Any
    last_gradient: Any = None


class StepTimer:
    """Times the phases of one step, of one batch or of several accumulated ones.

    Args:
        device: where the step computes. CUDA devices are timed by events, all others by the host's clock; the host's
            clock sees a device with its own queue (mps, xpu) only when its work is launched.
        parameters: give the model's parameters when several processes reduce gradients, and exposed communication is
            measured: from the last gradient that autograd hands to a parameter to the end of the backward. On CUDA the
            current stream waits for the collectives there; with gloo the calling thread does. Whatever else a strategy
            does after the last gradient, a fused update or a deferred weight gradient for example, counts too. Hooks
            sit on the parameters from :meth:`start` to :meth:`stop` only, and read nothing.

    Phases do not nest: a switch ends the phase before it.
    """

    def __init__(self, device: torch.device | str = "cpu", *, parameters: Iterable[nn.Parameter] | None = None) -> None:
        self._clock = Clock(device)
        self._watched = None if parameters is None else [p for p in parameters if p.requires_grad]
        self._batches: list[list[_Stretch]] = []
        self._running = False
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Open a batch, in no phase.

        Raises:
            RuntimeError: when the last batch was not stopped.
        """
        if self._running:
            raise RuntimeError("start() was called twice: call stop() at the end of each batch")
        self._running = True
        for p in self._watched or ():
            # Not register_post_accumulate_grad_hook: backward fusion takes that for a reader and steps aside.
            self._hooks.append(p.register_hook(self._gradient_ready))  # type: ignore[no-untyped-call]
        self._batches.append([_Stretch(OTHER, self._clock.mark())])

    def switch(self, phase: str) -> None:
        """End the current phase and begin ``phase``: ``"forward"``, ``"backward"``, ``"update"`` or ``"other"``.

        Raises:
            ValueError: for any other phase.
            RuntimeError: before :meth:`start` or after :meth:`stop`.
        """
        check_phase(phase, self._running)
        self._batches[-1].append(_Stretch(phase, self._clock.mark()))

    def stop(self) -> None:
        """Close the batch and take the hooks off; does nothing when none is open."""
        if self._running:
            self._batches[-1].append(_Stretch(OTHER, self._clock.mark()))
        self._running = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def timing(self) -> StepTiming:
        """Timing of the batches since the timer was made; on CUDA this waits for the device.

        Time between two batches is left out: the second begins where the first ended.

        Raises:
            RuntimeError: when a batch is open, or none was timed.
        """
        if self._running or not self._batches:
            raise RuntimeError("nothing to report: call start() and stop() around a batch first")
        spans: list[Span] = []
        step_ms = 0.0
        gradients_missing = False
        for stretches in self._batches:
            offsets = self._clock.offsets_ms([stretch.begin for stretch in stretches])
            for i, stretch in enumerate(stretches[:-1]):
                if stretch.phase == OTHER:
                    continue
                begin_ms, end_ms = step_ms + offsets[i], step_ms + offsets[i + 1]
                # Events resolve half a microsecond: two that follow at once may come out reversed.
                length_ms = max(0.0, end_ms - begin_ms)
                spans.append(Span(stretch.phase, "step", begin_ms, length_ms, stretch.phase))
                if stretch.phase != "backward" or self._watched is None:
                    continue
                if stretch.last_gradient is None:
                    gradients_missing = True
                    continue
                ready_ms = step_ms + self._clock.offsets_ms([stretches[0].begin, stretch.last_gradient])[1]
                exposed_ms = min(length_ms, max(0.0, end_ms - ready_ms))
                spans.append(Span(EXPOSED, "communication", end_ms - exposed_ms, exposed_ms, EXPOSED))
            step_ms += offsets[-1]

        def total(name: str) -> float:
            return sum(span.duration_ms for span in spans if span.name == name)

        return StepTiming(
            spans=tuple(spans),
            step_ms=step_ms,
            forward_ms=total("forward"),
            backward_ms=total("backward"),
            update_ms=total("update"),
            communication_exposed_ms=None if gradients_missing else total(EXPOSED),
            clock=self._clock.name,
        )

    def _gradient_ready(self, gradient: Tensor) -> None:
        stretch = self._batches[-1][-1]
        if stretch.phase == "backward":  # a user's own autograd.grad in the forward is no gradient of the step
            stretch.last_gradient = self._clock.mark(stretch.last_gradient)


# What each layer of a network costs on this core.


@dataclass(frozen=True)
class LayerTimes:
    """Cost of one layer: milliseconds of forward (F), output gradient (O), weight gradient (W); gradient bytes."""

    name: str
    forward_ms: float
    output_ms: float
    weight_ms: float
    bytes: int


def layer_times(model: nn.Module, inputs: Tensor, repeats: int = 5) -> list[LayerTimes]:
    """Median times of the leaf layers, in the order in which the forward pass calls them.

    Each layer is timed by itself on the input it gets inside the network. Arithmetic between layers is not seen, a
    layer called twice counts its bytes once, and layers whose inputs are not float tensors have no output gradient.
    """
    calls: list[tuple[str, nn.Module, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments and isinstance(arguments[0], Tensor):
                calls.append((name, module, arguments[0].detach()))

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    with ExitStack() as hooks:
        for name, module in leaves:
            hooks.enter_context(module.register_forward_pre_hook(note(name)))
        model(inputs)
    seen: set[int] = set()
    times = []
    for name, module, given in calls:
        parameters = [p for p in module.parameters() if p.requires_grad]
        fresh = [p for p in parameters if id(p) not in seen]
        seen |= {id(p) for p in fresh}
        times.append(_one(name, module, given, parameters, sum(p.numel() * p.element_size() for p in fresh), repeats))
    return times


def update_ms(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], repeats: int = 5) -> float:
    """Median milliseconds of the whole update, with gradients and states in place."""
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return _median_ms(optimizer.step, repeats)


def _one(
    name: str, module: nn.Module, given: Tensor, parameters: list[nn.Parameter], size: int, repeats: int
) -> LayerTimes:
    differentiable = given.is_floating_point()
    given = given.clone().requires_grad_(differentiable)
    forward = _median_ms(lambda: module(given), repeats)
    outputs = module(given)
    if not isinstance(outputs, Tensor) or not outputs.requires_grad:
        return LayerTimes(name, forward, 0.0, 0.0, size)
    gradient = torch.ones_like(outputs)

    def backward(wanted: list[Any]) -> float:
        if not wanted:
            return 0.0
        return _median_ms(lambda: torch.autograd.grad(outputs, wanted, gradient, retain_graph=True), repeats)

    return LayerTimes(name, forward, backward([given] if differentiable else []), backward(list(parameters)), size)


def _median_ms(work: Callable[[], Any], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return round(statistics.median(times), 4)


# What rounds of a measurement come to: median and quartiles, of values or of ratios inside of each round.


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over rounds, with the rounds themselves; the unit is the owner's."""

    median: float
    low: float
    high: float
    rounds: list[float] = field(default_factory=list)

    @property
    def reach(self) -> tuple[float, float]:
        """Between which numbers it lies: the quartiles; of fewer than five rounds, which say little, all of them."""
        return (min(self.rounds), max(self.rounds)) if 0 < len(self.rounds) < 5 else (self.low, self.high)


def spread(values: Sequence[float]) -> Spread:
    """Median, lower and upper quartile of `values`, one value a round."""
    if not values:
        raise ValueError("no rounds were measured: set rounds to at least 1")
    low, median, high = np.percentile(np.asarray(values, dtype=float), [25, 50, 75])
    return Spread(float(median), float(low), float(high), [float(value) for value in values])


def speedup(reference: Sequence[float], other: Sequence[float]) -> Spread:
    """Speed-up of `other` over `reference`: their ratio in each round, then its spread."""
    return spread([before / after for before, after in zip(reference, other, strict=True)])
