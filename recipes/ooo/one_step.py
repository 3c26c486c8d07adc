"""Real steps in a bare loop, plain or on two streams: what each thread ran and when, bytes of tensors, and turns.

A layer on two streams computes its gradients by its ``forward.kernels``: others around those note start and end. The
mechanism knows nothing of it, so that a step which is not recorded costs nothing.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import current_thread, main_thread
from time import perf_counter, process_time, thread_time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from retime.foundations.cpu_pool import MemoryPool
from retime.mechanisms.fusion import fuse_optimizer
from retime.mechanisms.two_streams import TwoStreamBackward
from retime.recipes.core import charts
from retime.recipes.core.build import CPU, build_batches, build_model, build_optimizer, loss_of
from retime.recipes.core.measure import interleave

KINDS = ("backward pass, the rest", "forward pass", "output gradients", "weight gradients", "update")
REST, FORWARD, OUTPUT, WEIGHT, UPDATE = range(len(KINDS))
MAIN, SUB, OTHERS = "main thread", "sub-stream", "other threads of kernels"
BUSY, BOXES, SETTINGS = "one step", "one step, boxes", "one step, settings"
PLAIN, FUSED, TWO_STREAMS, TAKEN_OFF = "plain", "plain, fused_optimizer", "two streams", "taken off"
_SHORT = {MAIN: "main", SUB: "sub-stream", OTHERS: "others"}
LEGEND = (
    "time from the step's start (ms); white: the thread runs none of these\n"
    "cores: share of the step in which one ran the main thread, the sub-stream, or other threads of kernels"
)
WARM_UP_STEPS, STEPS = 5, 9
TURN_STEPS = 4
"""Steps of a turn; the first of them is not counted."""

Case = dict[str, Any]
Box = tuple[int, str, float, float]
"""What it is (number of :data:`KINDS`), its lane, start and end."""


class Loop:
    """Training steps of a case on one batch.

    Args:
        case: of the recipe's settings: model, data, batch size, optimizer, and whether two streams fuse updates.
        threads: of each kernel, divided among both streams if there are two.
        two: whether weight gradients run beside output gradients.
        layers: names of those whose weight gradients do; None: all that can.
        fused: whether a plain step updates in its backward pass, as ``fused_optimizer`` does.
    """

    def __init__(
        self, case: Case, seed: int, threads: int, *, two: bool, layers: list[str] | None = None, fused: bool = False
    ) -> None:
        torch.set_num_threads(threads)
        self._model = build_model(case["model"], CPU, seed)
        ((self._inputs, self._targets),) = build_batches(case["data"], case["batch_size"], 1)
        self._optimizer = build_optimizer(case["optimizer"], self._model.parameters(), case.get("flags", {}))
        sub = max(1, threads // 2)
        both, beside = (max(1, threads - sub), sub), self._optimizer if case.get("fuse_updates") else None
        self.two: Any = TwoStreamBackward(self._model, optimizer=beside, threads=both, layers=layers) if two else None
        self.fusion: Any = fuse_optimizer(self._model, self._optimizer) if fused else getattr(self.two, "fusion", None)
        self.boxes: list[Box] = []
        self._sub_cpu_s = 0.0

    def step(self) -> dict[str, Any]:
        """Train a step; return its milliseconds, its boxes, and how long each lane's threads had a core."""
        self.boxes, self._sub_cpu_s = [], 0.0
        process_s, main_s, marks = process_time(), thread_time(), [perf_counter()]
        loss: Tensor = loss_of(self._model(self._inputs), self._targets)
        marks.append(perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad()
        marks.append(perf_counter())
        main_s, process_s = thread_time() - main_s, process_time() - process_s
        busy = {MAIN: main_s, SUB: self._sub_cpu_s, OTHERS: max(0.0, process_s - main_s - self._sub_cpu_s)}
        return {
            "ms": round(1e3 * (marks[-1] - marks[0]), 3),
            "busy_ms": {lane: round(1e3 * seconds, 3) for lane, seconds in busy.items()},
            "boxes": [
                (kind, lane, *(round(1e3 * (moment - marks[0]), 3) for moment in edges))
                for kind, lane, *edges in self._all_boxes(marks)
            ],
        }

    def _all_boxes(self, marks: list[float]) -> list[Box]:
        """All of a step's, the rest of the backward pass first, so that gradients are drawn over it."""
        began, ended = marks[1:3]
        noted = self.boxes
        rest = [(began, ended)]
        if sub_ends := [end for _, lane, _, end in noted if lane == SUB]:
            # behind its own work the main thread takes weight gradients, and then waits for the sub-stream's last one
            mine = [(kind, start, end) for kind, lane, start, end in noted if lane == MAIN]
            own_end = min(
                [start for kind, start, _ in mine if kind in (WEIGHT, UPDATE)],
                default=max([end for _, _, end in mine], default=began),
            )
            rest = [(began, own_end), (max([*sub_ends, *(end for _, _, end in mine)]), ended)]
        return [
            (FORWARD, MAIN, marks[0], began),
            *((REST, MAIN, start, end) for start, end in rest),
            *sorted(noted, key=lambda box: box[2]),
            (UPDATE, MAIN, ended, marks[3]),
        ]

    def note_kernels(self) -> None:
        """From now on gradients of layers on two streams have boxes of their own."""
        for module in self._model.modules():
            forward: Any = vars(module).get("forward")
            if hasattr(forward, "kernels"):
                kernels = forward.kernels
                forward.kernels = SimpleNamespace(
                    forward=kernels.forward,
                    arguments=kernels.arguments,
                    output_gradient=partial(self._noted, OUTPUT, kernels.output_gradient),
                    weight_gradients=partial(self._noted, WEIGHT, kernels.weight_gradients),
                )
        if self.fusion is not None:
            self.fusion._step = partial(self._noted, UPDATE, self.fusion._step)

    def _noted(self, kind: int, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Call it, and note its lane, start and end in seconds."""
        started, cpu_s = perf_counter(), thread_time()
        answer = compute(*arguments)
        is_main = current_thread() is main_thread()
        self.boxes.append((kind, MAIN if is_main else SUB, started, perf_counter()))
        if not is_main:
            self._sub_cpu_s += thread_time() - cpu_s
        return answer

    def close(self) -> None:
        """End the second stream, and the fusion."""
        if one := self.two or self.fusion:
            one.remove()

    def warm_up(self, forward: int = 0) -> None:
        """Train some steps; of two streams, all but the first have so many threads in the forward pass."""
        for _ in range(WARM_UP_STEPS):
            self.step()
            if forward:  # the first step has the main stream's
                self.two._use(replace(self.two._now, forward_threads=forward))

    def turn_ms(self, threads: int) -> float:
        """Return the median milliseconds of a step, of a few in a row in which kernels have so many threads."""
        torch.set_num_threads(threads)
        return round(float(statistics.median([self.step()["ms"] for _ in range(TURN_STEPS)][1:])), 4)


def middle_step(case: Case, seed: int, threads: int, forward: int = 0, **which: Any) -> dict[str, Any]:
    """Return what :meth:`Loop.step` says of the step of median length, with so many threads in the forward pass."""
    loop = Loop(case, seed, threads, **which)
    loop.note_kernels()
    loop.warm_up(forward)
    steps = [loop.step() for _ in range(STEPS)]
    loop.close()
    middle = statistics.median_low(step["ms"] for step in steps)
    return next(step for step in steps if step["ms"] == middle)


def label(kind: str, threads: int) -> str:
    """Return the name of a variant whose kernels have so many threads."""
    return f"{kind}, {threads} thread{'s' if threads > 1 else ''}"


class BareLoops:
    """Bare loops in a process of their own: the first request says what is trained, each further one what to do."""

    def begin(self, request: dict[str, Any]) -> None:
        """Take what is trained from this request."""
        self._case, self._seed = request["case"], request["seed"]

    def both_steps(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a plain step and one on two streams as facts, by arguments of :func:`middle_step`; boxes are text."""
        facts: dict[str, Any] = {BUSY: {}}
        for name in (PLAIN, TWO_STREAMS):
            step = middle_step(self._case, self._seed, two=name == TWO_STREAMS, **request[name])
            facts[f"{BOXES}, {name}"] = [";".join(map(str, box)) for box in step.pop("boxes")]
            facts[BUSY][name] = step
        return facts

    def peak_bytes(self, request: dict[str, Any]) -> int:
        """Return the most bytes alive in tensors of 16 KiB and more, oneDNN's scratch with them, over steps of a loop.

        Raises:
            RuntimeError: there is no pool here, which counts them.
        """
        pool = MemoryPool()
        if not pool.install():
            raise RuntimeError(pool.why_not)
        gc.collect()
        before = pool.counts().live
        loop = Loop(self._case, self._seed, **request["which"])
        for number in range(2 * WARM_UP_STEPS):
            if number == WARM_UP_STEPS:
                pool.reset_peaks()
            loop.step()
        loop.close()
        peak = pool.counts().peak_live - before
        pool.remove()
        return peak

    def turns(self, request: dict[str, Any]) -> dict[str, list[float]]:
        """Return milliseconds of a step, a value a round: plain, on two streams, and with two streams taken off again.

        All are in one process, so that they share a heap and its pages: what processes differ by is not among them.
        Labels end with the number of threads, as plain steps are tried with each; two streams have a single setting,
        `two`, as of :func:`middle_step`. Where these fuse updates, there are plain steps with and without fusion, and
        those from which they were taken off have it. `first` is the number of the loop that is made first, as a later
        one has other places in the heap.
        """
        two, first, fuses = request["two"], request["first"], bool(self._case.get("fuse_updates"))
        threads, loop_of = two["threads"], partial(Loop, self._case, self._seed, two["threads"])
        on_two = partial(loop_of, two=True, layers=two["layers"])
        kinds = {PLAIN: partial(loop_of, two=False), TAKEN_OFF: on_two, TWO_STREAMS: on_two}
        kinds |= {FUSED: partial(loop_of, two=False, fused=True)} if fuses else {}
        names = list(kinds)
        loops: dict[str, Loop] = {}
        for number in range(first, first + len(names)):
            name = names[number % len(names)]
            loops[name] = kinds[name]()
            loops[name].warm_up(two["forward"] or threads if name == TWO_STREAMS else 0)
        loops[TAKEN_OFF].two._take_off()
        blocks = {TWO_STREAMS: partial(loops[TWO_STREAMS].turn_ms, two["forward"] or threads)}
        for number in range(1, threads + 1):
            blocks |= {label(one, number): partial(loops[one].turn_ms, number) for one in names if one != TWO_STREAMS}
        turns = interleave(blocks, request["rounds"])
        for loop in loops.values():
            loop.close()
        return turns


def draw(axes: Any, title: str, facts: dict[str, Any]) -> None:
    """Draw a plain step above one on two streams, on one clock, with how long each had a core."""
    lanes = {SUB: SUB, MAIN: MAIN, "plain": "plain step"}
    boxes = []
    for name in ("plain", "two streams"):
        for text in facts[f"{BOXES}, {name}"]:
            kind, lane, start, end = text.split(";")
            boxes.append((int(kind), "plain" if name == "plain" else lane, float(start), float(end)))
    charts.lanes(axes, boxes, lanes)
    axes.set_xlim(0, max(end for *_, end in boxes))
    axes.tick_params(labelsize=8)
    axes.set_title("\n".join([title, *(f"{name}: {_busy(step)}" for name, step in facts[BUSY].items())]), fontsize=8)


def _busy(step: dict[str, Any]) -> str:
    shares = (f"{_SHORT[lane]} {100 * ms / step['ms']:.0f} %" for lane, ms in step["busy_ms"].items() if ms)
    return f"{step['ms']:.1f} ms; cores: {', '.join(shares)}"
