"""Run a schedule on paper: when each task starts and ends, what waits, and how much memory is alive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from retime.schedules.buffers import Buffer, Usage, memory_usage
from retime.schedules.errors import ScheduleError
from retime.schedules.schedule import DEFAULT_LANE, Schedule
from retime.schedules.tasks import Task
from retime.schedules.timeline import Span
from retime.schedules.validate import Needs, execution_order

Costs = Mapping[str, float] | Callable[[Task], float]
"""Milliseconds a task: a function, or a mapping by text form, by kind and number, or by kind alone."""


@dataclass(frozen=True)
class Timeline:
    """What :func:`simulate` found.

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
    makespan_ms = max(end_ms.values(), default=0.0)
    usage: Usage = memory_usage(buffers, start_ms, end_ms, makespan_ms)
    return Timeline(
        spans=tuple(
            Span(str(task), lane_of[task], start_ms[task], end_ms[task] - start_ms[task], task.kind.words)
            for task in schedule
        ),
        start_ms=start_ms,
        end_ms=end_ms,
        makespan_ms=makespan_ms,
        busy_ms=busy_ms,
        idle_ms={lane: max(0.0, makespan_ms - busy) for lane, busy in busy_ms.items()},
        peak_bytes=usage.peak_bytes,
        peak_ms=usage.peak_ms,
        peak_buffers=usage.peak_buffers,
        memory=usage.curve,
    )


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
