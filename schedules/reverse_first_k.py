"""Reverse-first-k: the first k layers' weight gradients last, layer 1's first of them (Oh et al. 2022, section 5.1).

The next forward pass starts with layer 1, so its weight gradient is the one whose synchronisation cannot wait. The
conventional order computes it last; reverse-first-k puts the weight gradients of layers 2 to k behind it, and they run
while it travels. As in the rest of this package ``O_1``, the gradient of the batch, is left out.

:func:`largest_k` bounds k by memory, :class:`KSearch` finds the best one by measuring: coarse steps, then ever finer
ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from retime.schedules.errors import ScheduleError, check_count
from retime.schedules.schedule import Kind, Schedule, Task
from retime.schedules.simulate import Sizes, simulate, step_buffers


def reverse_first_k(layers: int, k: int, *, steps: int = 1, without_weights: Collection[int] = ()) -> Schedule:
    """Forward pass, then Algorithm 2, lines 3 to 6, with each ``S_i`` behind its ``W_i``.

    ``k=0`` and ``k=1`` are the conventional order, known as wait-free backpropagation: Figure 4 (a). On a lane of its
    own (``split({"S": "network"})``) S keeps the order in which the weight gradients are made.

    >>> str(reverse_first_k(3, 2))
    'F1 F2 F3 W3 S3 O3 O2 W1 S1 W2 S2'

    Args:
        layers: L, at least 1.
        k: how many layers to defer, counted from the first; 0 to L.
        steps: training steps, at least 1.
        without_weights: layers that have no parameters, such as the loss: they get neither W nor S.

    Raises:
        ValueError: when a number is out of its range.
    """
    check_count(layers=layers, steps=steps)
    check_count(0, f" (nothing deferred), to {layers}", k=k)
    if k > layers:
        raise ValueError(f"k={k}: give 0 (nothing deferred) to {layers}, the number of layers")
    tasks: list[Task] = []
    for step in range(steps):
        weighted = [layer not in without_weights for layer in range(layers + 1)]
        tasks += [Task(Kind.F, layer, step=step) for layer in range(1, layers + 1)]
        for layer in range(layers, 0, -1):
            if layer > k and weighted[layer]:
                tasks += _weight_gradient(layer, step)
            if layer > 1:
                tasks.append(Task(Kind.O, layer, step=step))
        for layer in range(1, k + 1):
            if weighted[layer]:
                tasks += _weight_gradient(layer, step)
    return Schedule.sequence(tasks)


def communicate_last(schedule: Schedule, layers: Collection[int]) -> Schedule:
    """Prioritise the communication of all other layers: S of ``layers`` goes behind the last other S of its step.

    Figure 4 (b) does so with the last layer, whose weights the next forward pass needs last.

    >>> str(communicate_last(reverse_first_k(3, 0), {3}))
    'F1 F2 F3 W3 O3 W2 S2 O2 W1 S1 S3'

    Args:
        schedule: of one lane, such as :func:`reverse_first_k` gives.
        layers: whose synchronisation waits, in the order they have in ``schedule``.

    Raises:
        ScheduleError: when the schedule has several lanes.
    """
    if len(schedule.lanes) > 1:
        names = ", ".join(lane.name for lane in schedule.lanes)
        raise ScheduleError(f"the schedule already has the lanes {names}: prioritise before split()")
    last = {task.step: task for task in schedule if task.kind is Kind.S and task.layer not in layers}
    deferred: dict[int, list[Task]] = {step: [] for step in last}
    tasks: list[Task] = []
    for task in schedule:
        if task.kind is Kind.S and task.layer in layers and task.step in last:
            deferred[task.step].append(task)
            if last[task.step] in tasks:  # already behind the others
                tasks.append(deferred[task.step].pop())
            continue
        tasks.append(task)
        if task == last.get(task.step):
            tasks += deferred[task.step]
            deferred[task.step] = []
    return Schedule.sequence(tasks)


def backward_to_forward(schedule: Schedule) -> Schedule:
    """Cut a schedule of one lane to what section 2 minimises: one backward pass and the forward pass after it.

    >>> str(backward_to_forward(reverse_first_k(2, 0, steps=2)))
    "W2 S2 O2 W1 S1 F1' F2'"

    Args:
        schedule: of at least two steps, numbered from 0.

    Raises:
        ScheduleError: when the schedule has several lanes, or no second step.
    """
    if len(schedule.lanes) > 1 or not any(task.step for task in schedule):
        raise ScheduleError("the schedule has several lanes or only one step: cut two steps, and before split()")
    return Schedule.sequence(task for task in schedule if (task.step, task.kind is Kind.F) in ((0, False), (1, True)))


def largest_k(
    layers: int,
    max_memory: int,
    *,
    activation_bytes: Sizes = 0,
    output_gradient_bytes: Sizes = 0,
    weight_gradient_bytes: Sizes = 0,
    plain_peak_bytes: int | None = None,
) -> int:
    """The largest k that reverse-first-k can take within ``max_memory``, as can every smaller k: Algorithm 2, line 1.

    The paper's bound is ``f(j) = M_fwd - sum of M(O_i) for i > j + sum of M(W_i) for i <= j``, below the limit: what is
    alive after the forward pass, less what the layers above j have given back once they are done, plus what the j
    deferred layers add. That is one moment of the step, with M the temporary memory of a computation. Here the whole
    step is simulated with the life of every buffer (:func:`step_buffers`), and its peak must not be above the limit;
    f(j) follows from the buffers alive when ``W_1`` starts. What the sizes leave out (parameters, optimizer state,
    workspaces) is the difference between the measured plain peak and the simulated one, and counts for every k.

    Args:
        layers: L, at least 1.
        max_memory: bytes that the peak may reach.
        activation_bytes: size of the output of layer t that is kept for the backward pass, by t; t = 0 is the batch.
        output_gradient_bytes: size of the result of ``O_i``, by i.
        weight_gradient_bytes: size of the result of ``W_i``, by i; 0 where gradients live in buckets from the start.
        plain_peak_bytes: the peak measured in the conventional order; the simulated one when left out.

    Returns:
        0 to ``layers - 1``.

    Raises:
        ValueError: when ``layers`` is below 1, or not even the conventional order fits into ``max_memory``.
    """

    def peak_bytes(k: int) -> int:
        schedule = reverse_first_k(layers, k)
        buffers = step_buffers(
            schedule,
            activation_bytes=activation_bytes,
            output_gradient_bytes=output_gradient_bytes,
            weight_gradient_bytes=weight_gradient_bytes,
        )
        # Memory depends on the order of the computations only: S takes no time, all others the same.
        return simulate(schedule, {"F": 1.0, "O": 1.0, "W": 1.0, "S": 0.0}, buffers=buffers).peak_bytes

    check_count(layers=layers)
    check_count(0, max_memory=max_memory)
    if plain_peak_bytes is not None:
        check_count(0, ", or None for the simulated one", plain_peak_bytes=plain_peak_bytes)
    simulated_bytes = peak_bytes(0)
    plain_bytes = simulated_bytes if plain_peak_bytes is None else plain_peak_bytes
    if max_memory < plain_bytes:
        raise ValueError(
            f"max_memory={max_memory} is below the {plain_bytes} bytes that a step takes with nothing deferred: "
            f"give at least {plain_bytes}, or make the batch smaller"
        )
    allowed_bytes = max_memory - plain_bytes + simulated_bytes
    k = 0
    while k < layers - 1 and peak_bytes(k + 1) <= allowed_bytes:
        k += 1
    return k


def _weight_gradient(layer: int, step: int) -> list[Task]:
    return [Task(Kind.W, layer, step=step), Task(Kind.S, layer, step=step)]


_FIRST_PASS = 10
"""The first pass goes up in tenths of the layers."""


class KSearch:
    """Finds the k with the least step time from few measurements; the caller measures.

    The first pass goes from 0 to below L in steps of L / 10, rounded up so that it never has more than ten stops. Then
    the step is halved again and again, each time searching the open range of one former step on either side of the best
    k so far, until the step would fall below 1. No k is measured twice. If the step time falls up to some k and rises
    after it, which the paper takes for granted, the answer is the best of all k.

    The search is a function of the recorded times alone: ranks that record the same numbers measure the same k, and
    recording ``measured.values()`` again, in order, resumes it.

    >>> search = KSearch(8)
    >>> while (k := search.next_k) is not None:
    ...     search.record(seconds=1.0 + abs(k - 5))
    >>> search.best
    5

    Args:
        layers: L, at least 1; k stays below it.
        largest: the largest k allowed, such as a memory bound gives; the tenths are then taken of what it leaves.
        budget: the most k to measure, at least 1; the search then ends with the best so far. ``None`` for no limit.

    Attributes:
        measured: seconds by k, in the order measured.

    Raises:
        ValueError: when an argument is out of its range.
    """

    measured: dict[int, float]

    def __init__(self, layers: int, *, largest: int | None = None, budget: int | None = None) -> None:
        check_count(layers=layers)
        if largest is not None:
            check_count(0, ", where 0 defers nothing", largest=largest)
        if budget is not None:
            check_count(1, ", or None for no limit", budget=budget)
        self.measured = {}
        self._budget = budget
        self._last = layers - 1 if largest is None else min(largest, layers - 1)
        self._step = math.ceil((self._last + 1) / _FIRST_PASS)
        self._ahead = list(range(0, self._last + 1, self._step))

    @property
    def next_k(self) -> int | None:
        """The k to measure now; None when the search has ended."""
        spent = self._budget is not None and len(self.measured) >= self._budget
        return None if spent or not self._ahead else self._ahead[0]

    def record(self, seconds: float) -> None:
        """Take note of the step time measured at :attr:`next_k`.

        Args:
            seconds: of one training step, 0 or more.

        Raises:
            ValueError: when ``seconds`` is negative or no finite number.
            RuntimeError: when the search has ended.
        """
        k = self.next_k
        if k is None:
            raise RuntimeError(f"the search for k has ended with k={self.best}: record only while next_k is not None")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds={seconds} at k={k}: give the measured time of a step, a finite number")
        self.measured[k] = seconds
        del self._ahead[0]
        while not self._ahead and self._step > 1:
            self._refine()

    @property
    def best(self) -> int:
        """The k with the least time so far, the smaller of equals; 0 before anything was measured."""
        return min(self.measured, key=lambda k: (self.measured[k], k), default=0)

    def _refine(self) -> None:
        """Halve the step and look at what lies less than one former step from the best."""
        reach, self._step = self._step - 1, self._step // 2
        stops = reach // self._step
        around = (self.best + stop * self._step for stop in range(-stops, stops + 1))
        self._ahead = [k for k in around if 0 <= k <= self._last and k not in self.measured]
