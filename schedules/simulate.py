"""Run a schedule on paper: when each task starts and ends, what waits, and how much device memory is alive."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from retime.schedules.errors import ScheduleError
from retime.schedules.schedule import DEFAULT_LANE, Kind, Needs, Schedule, Task, execution_order
from retime.schedules.timeline import Span

Costs = Mapping[str, float] | Callable[[Task], float]
"""Milliseconds a task: a function, or a mapping by text form, by kind and number, or by kind alone."""


@dataclass(frozen=True)
class Timeline:
    """Result of :func:`simulate`.

    Args:
        spans: one box a task, in starting order within each lane; the category is the kind in words.
        start_ms: when each task starts, in milliseconds from the start of the schedule.
        end_ms: when each task ends.
        makespan_ms: when the last task ends.
        busy_ms: per lane, the time in which it works.
        idle_ms: per lane, the rest of the makespan: waits before, between and after its tasks.
        peak_bytes: the most device memory alive at once, of the buffers given.
        peak_ms: when that is first the case.
        peak_buffers: the names of the buffers alive then.
        memory: the curve, as (milliseconds, bytes alive from then on).
    """

    spans: tuple[Span, ...]
    start_ms: Mapping[Task, float]
    end_ms: Mapping[Task, float]
    makespan_ms: float
    busy_ms: Mapping[str, float]
    idle_ms: Mapping[str, float]
    peak_bytes: int
    peak_ms: float
    peak_buffers: tuple[str, ...]
    memory: tuple[tuple[float, int], ...]


def simulate(
    schedule: Schedule,
    costs: Costs,
    resources: Mapping[str, str] | None = None,
    *,
    buffers: Iterable[Buffer] = (),
    needs: Needs | None = None,
    delay_ms: Callable[[Task, Task], float] | None = None,
) -> Timeline:
    """Run ``schedule``: each lane does its tasks in order, each as soon as its needs have finished.

    A lane is one resource that works on one task at a time, so the result is exact for streams and links that do not
    slow each other down; contention has to be put into ``costs``.

    >>> step = Schedule.parse("O3 W3 S3 O2 W1 S1 W2 S2")
    >>> simulate(step, {"O": 1, "W": 1, "S": 2}, {"S": "network"}).makespan_ms
    8.0

    Args:
        schedule: one or several steps.
        costs: milliseconds a task. A mapping is asked for the full text form (``"F1@0"``), then for kind and number
            (``"F1"``), then for the kind (``"F"``).
        resources: which kinds run on a lane of their own, such as ``{"S": "network", "D": "copy"}``; only for a
            schedule of one lane.
        buffers: what occupies device memory from when to when; see :func:`step_buffers`.
        needs: what each task needs, for a model that is no chain of layers; :func:`dependencies` when left out.
        delay_ms: called with a need and the task that needs it; milliseconds between the end of the one and the
            earliest start of the other, such as the transfer between two devices. No lane is busy in between.

    Raises:
        ScheduleError: when the schedule is invalid, a cost is missing or no duration, or a buffer names a task that
            the schedule does not have.
    """
    if resources is not None:
        schedule = schedule.split(resources)
    order = execution_order(schedule, needs)
    lane_of = {task: lane.name or DEFAULT_LANE for lane in schedule.lanes for task in lane.tasks}
    free_ms = dict.fromkeys((lane.name or DEFAULT_LANE for lane in schedule.lanes), 0.0)
    busy_ms = dict(free_ms)
    start_ms: dict[Task, float] = {}
    end_ms: dict[Task, float] = {}
    for task, task_needs in order.items():
        lane = lane_of[task]
        arrivals = [end_ms[need] + (_delay(delay_ms, need, task) if delay_ms else 0.0) for need in task_needs]
        cost_ms = _cost(costs, task)
        start_ms[task] = max(free_ms[lane], *arrivals, 0.0)
        end_ms[task] = free_ms[lane] = start_ms[task] + cost_ms
        busy_ms[lane] += cost_ms
    return timeline_of(schedule, start_ms, end_ms, busy_ms, buffers)


def _cost(costs: Costs, task: Task) -> float:
    if callable(costs):
        cost_ms = costs(task)
    else:
        forms = (str(task), f"{task.kind}{task.layer}", str(task.kind))
        key = next((form for form in forms if form in costs), None)
        if key is None:
            raise ScheduleError(f"costs has no duration for {task}: add {forms[1]!r} or {forms[2]!r} in milliseconds")
        cost_ms = costs[key]
    return _duration(cost_ms, f"the cost of {task}")


def _delay(delay_ms: Callable[[Task, Task], float], need: Task, task: Task) -> float:
    return _duration(delay_ms(need, task), f"the delay between {need} and {task}")


def _duration(duration_ms: float, what: str) -> float:
    if not (math.isfinite(duration_ms) and duration_ms >= 0):
        raise ScheduleError(f"{what} is {duration_ms}: give 0 or more milliseconds")
    return float(duration_ms)


Sizes = Mapping[int, int] | int
"""Bytes by number of the layer or tensor (0 where the mapping has no entry), or one size for all."""


@dataclass(frozen=True)
class Buffer:
    """A block of device memory: alive from the start of the first task that makes it to the end of its last use.

    Args:
        name: for reports, such as ``"Y2"``.
        size_bytes: how large.
        written_by: the tasks that write it; empty when it is there from the start.
        used_by: the tasks after which it can go; empty when it stays until the end of the schedule.

    Raises:
        ScheduleError: when the size is negative.
    """

    name: str
    size_bytes: int
    written_by: tuple[Task, ...] = ()
    used_by: tuple[Task, ...] = ()

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ScheduleError(f"buffer {self.name!r} has size_bytes={self.size_bytes}: give 0 or more bytes")


def step_buffers(
    tasks: Iterable[Task],
    *,
    activation_bytes: Sizes = 0,
    output_gradient_bytes: Sizes = 0,
    weight_gradient_bytes: Sizes = 0,
) -> list[Buffer]:
    """The buffers of training steps whose layers form a chain of n.

    - ``Y_t``, the output of layer t (t = 0: the batch): from ``F_t``, the batch from ``F_1``, until ``F_{t+1}``,
      ``O_{t+1}`` and ``W_{t+1}`` have read it; ``Y_n`` until ``O_n`` and ``W_n``, which here include the loss.
      Offloaded, it goes after ``F_{t+1}`` and ``D_t`` and comes back with ``P_t``. Where no F makes it, it is there
      from the start.
    - ``dY_i``, the result of ``O_i``: until ``O_{i-1}`` and ``W_{i-1}`` have read it. Deferring W keeps it longer
      (Oh et al. 2022, section 3).
    - ``dW_i``, the result of ``W_i``: until ``U_i``, without U to the end. Updating early frees it early.

    Parameters and optimizer state are constant, workspaces belong to single tasks: add a :class:`Buffer` for each that
    matters. So too where a layer's backward pass reads its own output, as an in-place ReLU does.

    Args:
        tasks: of one or several steps, such as a schedule.
        activation_bytes: size of ``Y_t`` by t; of one micro-batch when tasks have one.
        output_gradient_bytes: size of ``dY_i`` by i; of one micro-batch when tasks have one.
        weight_gradient_bytes: size of ``dW_i`` by i; micro-batches add into one buffer.
    """
    step = _Step(tuple(tasks))
    buffers: list[Buffer] = []
    for tensor in step.tensors():
        size_bytes = size_of(activation_bytes, tensor.layer)
        buffers += step.activations(tensor, size_bytes)
    for task in step.tasks:
        if task.kind is Kind.O:
            readers = step.pick(task, (Kind.O, task.layer - 1), (Kind.W, task.layer - 1))
            size_bytes = size_of(output_gradient_bytes, task.layer)
            buffers.append(Buffer(f"dY{_marks(task)}", size_bytes, (task,), readers or (task,)))
    by_layer: dict[tuple[Kind, int, int], tuple[Task, ...]] = defaultdict(tuple)
    for task in step.tasks:
        by_layer[task.kind, task.layer, task.step] += (task,)
    for (kind, layer, number), writers in tuple(by_layer.items()):
        if kind is Kind.W:
            name = f"dW{_marks(Task(Kind.W, layer, None, number))}"
            updates = by_layer[Kind.U, layer, number]
            buffers.append(Buffer(name, size_of(weight_gradient_bytes, layer), writers, updates))
    return [buffer for buffer in buffers if buffer.size_bytes]


class _Step:
    def __init__(self, tasks: tuple[Task, ...]) -> None:
        self.tasks = tasks
        self._listed = frozenset(tasks)
        self._last_layer = max((task.layer for task in tasks if task.kind in (Kind.F, Kind.O, Kind.W)), default=0)

    def pick(self, near: Task, *wanted: tuple[Kind, int]) -> tuple[Task, ...]:
        """Return the wanted tasks that are listed for the micro-batch and step of ``near``."""
        layered = [(kind, number) for kind, number in wanted if number >= 1 or kind in (Kind.D, Kind.P)]
        tasks = [Task(kind, number, near.micro_batch, near.step) for kind, number in layered]
        return tuple(task for task in tasks if task in self._listed)

    def tensors(self) -> list[Task]:
        """Every activation that some listed task makes or reads, as the task that would offload it."""
        tensors: dict[Task, None] = {}
        for task in self.tasks:
            if task.kind in (Kind.F, Kind.O, Kind.W):
                numbers = [task.layer - 1]
                if task.kind is Kind.F or task.layer == self._last_layer:
                    numbers.append(task.layer)
                tensors.update(dict.fromkeys(Task(Kind.D, t, task.micro_batch, task.step) for t in numbers))
        return list(tensors)

    def activations(self, tensor: Task, size_bytes: int) -> list[Buffer]:
        """The one stay on the device of an activation, or with an offload the two."""
        number = tensor.layer
        written_by = self.pick(tensor, (Kind.F, max(number, 1)))
        forward = written_by + self.pick(tensor, (Kind.F, number + 1))
        reader = number if number == self._last_layer else number + 1
        backward = self.pick(tensor, (Kind.O, reader), (Kind.W, reader))
        offload = self.pick(tensor, (Kind.D, number))
        prefetch = self.pick(tensor, (Kind.P, number))
        name = f"Y{_marks(tensor)}"
        if not (offload or prefetch):
            return [Buffer(name, size_bytes, written_by, _once(forward + backward))]
        stays = []
        if forward or offload:
            stays.append(Buffer(name, size_bytes, written_by, _once(forward + offload)))
        if prefetch:
            stays.append(Buffer(name, size_bytes, prefetch, prefetch + backward))
        return stays


def timeline_of(
    schedule: Schedule,
    start_ms: Mapping[Task, float],
    end_ms: Mapping[Task, float],
    busy_ms: Mapping[str, float],
    buffers: Iterable[Buffer],
) -> Timeline:
    """Put together when the tasks of ``schedule`` ran, what waited, and how much memory was alive.

    Args:
        schedule: what ran.
        start_ms: when each task starts.
        end_ms: when each task ends.
        busy_ms: per lane, the time in which it works.
        buffers: see :class:`Buffer`.

    Raises:
        ScheduleError: when a buffer names a task that is not on the timeline.
    """
    makespan_ms = max(end_ms.values(), default=0.0)
    curve, peak_ms, peak_bytes, peak_buffers = _memory(buffers, start_ms, end_ms, makespan_ms)
    return Timeline(
        spans=tuple(
            Span(str(task), lane.name or DEFAULT_LANE, start_ms[task], end_ms[task] - start_ms[task], task.kind.words)
            for lane in schedule.lanes
            for task in lane.tasks
        ),
        start_ms=start_ms,
        end_ms=end_ms,
        makespan_ms=makespan_ms,
        busy_ms=busy_ms,
        idle_ms={lane: max(0.0, makespan_ms - busy) for lane, busy in busy_ms.items()},
        peak_bytes=peak_bytes,
        peak_ms=peak_ms,
        peak_buffers=peak_buffers,
        memory=tuple(curve),
    )


def _memory(
    buffers: Iterable[Buffer], start_ms: Mapping[Task, float], end_ms: Mapping[Task, float], makespan_ms: float
) -> tuple[list[tuple[float, int]], float, int, tuple[str, ...]]:
    """Add up buffers: (milliseconds, bytes alive from then on); when most are alive, how many bytes, and which.

    Where one buffer ends at the moment at which another starts, the first is gone: a stream allocates in order.
    """
    lives: list[tuple[float, float, Buffer]] = []
    for buffer in buffers:
        for task in (*buffer.written_by, *buffer.used_by):
            if task not in start_ms:
                raise ScheduleError(f"buffer {buffer.name!r} names {task}, which the schedule does not have")
        born_ms = min((start_ms[task] for task in buffer.written_by), default=0.0)
        dead_ms = max((end_ms[task] for task in buffer.used_by), default=makespan_ms)
        if dead_ms < born_ms:
            raise ScheduleError(f"buffer {buffer.name!r} is used before it is written: check written_by and used_by")
        lives.append((born_ms, dead_ms, buffer))

    allocated: dict[float, int] = defaultdict(int)
    freed: dict[float, int] = defaultdict(int)
    momentary: dict[float, int] = defaultdict(int)  # whole life in tasks without duration: counts at that moment only
    for born_ms, dead_ms, buffer in lives:
        if born_ms == dead_ms:
            momentary[born_ms] += buffer.size_bytes
        else:
            allocated[born_ms] += buffer.size_bytes
            freed[dead_ms] += buffer.size_bytes
    alive_bytes, curve = 0, []
    for now_ms in sorted({*allocated, *freed, *momentary}):
        alive_bytes += allocated[now_ms] - freed[now_ms]
        curve.append((now_ms, alive_bytes + momentary[now_ms]))
        if momentary[now_ms]:
            curve.append((now_ms, alive_bytes))
    peak_ms, peak_bytes = max(curve, key=lambda point: point[1], default=(0.0, 0))
    peak_buffers = tuple(
        buffer.name for born, dead, buffer in lives if born <= peak_ms and (peak_ms < dead or born == dead == peak_ms)
    )
    return curve, peak_ms, peak_bytes, peak_buffers


def _once(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    return tuple(dict.fromkeys(tasks))


def size_of(sizes: Sizes, number: int) -> int:
    """Bytes of the layer or tensor with this number."""
    return sizes if isinstance(sizes, int) else sizes.get(number, 0)


def _marks(task: Task) -> str:
    """The number and the marks of a task's text form: ``"2@0'"``."""
    return str(task)[1:]
