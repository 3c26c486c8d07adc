"""Run a pipeline schedule on paper: times with messages between ranks, bubbles, and live activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from retime.schedules.dependencies import dependencies
from retime.schedules.pipeline.costs import Hops, StageCosts, check_stages, hop_table
from retime.schedules.pipeline.lanes import lane_name
from retime.schedules.pipeline.placement import Placement
from retime.schedules.schedule import Lane, Schedule
from retime.schedules.simulate import Timeline, simulate
from retime.schedules.tasks import Kind, Task
from retime.schedules.validate import execution_order


@dataclass(frozen=True)
class PipelineTimeline:
    """What :func:`simulate_pipeline` found; the tuples are by rank.

    Args:
        timeline: starts, ends, idle times and boxes to draw, over the ranks' lanes and those of links.
        idle_ms: the part of the makespan in which a rank does not compute.
        bubble_share: the same as a share of the makespan.
        peak_activations: the most stages' activations alive at once.
        peak_bytes: the most of their bytes.
    """

    timeline: Timeline
    idle_ms: tuple[float, ...]
    bubble_share: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]

    @property
    def makespan_ms(self) -> float:
        """When the last task ends."""
        return self.timeline.makespan_ms


def simulate_pipeline(
    schedule: Schedule,
    placement: Placement,
    costs: StageCosts,
    *,
    hops: Hops = 0.0,
    synchronisation_ms: Callable[[Task], float] | None = None,
) -> PipelineTimeline:
    """Run ``schedule``; an F or an O on another rank waits for its message, and each link carries one at a time.

    >>> from retime.schedules.pipeline import block, gpipe
    >>> ran = simulate_pipeline(gpipe(block(4, 2), 2), block(4, 2), StageCosts.uniform(4))
    >>> ran.makespan_ms, ran.idle_ms, ran.peak_activations
    (17.0, (7.0, 5.0), (4, 4))

    Args:
        schedule: a lane a rank, named as the schedules of this room name them, and lanes of S.
        placement: which rank holds which stage.
        costs: of the stages.
        hops: see :data:`Hops`.
        synchronisation_ms: time of an S; 0 when left out.

    Raises:
        ScheduleError: when the schedule is invalid.
        ValueError: when a number is out of its range.
    """
    check_stages(costs, placement)
    table = hop_table(hops, placement.ranks)
    order = execution_order(schedule, dependencies(schedule))

    def cost_ms(task: Task) -> float:
        if task.kind is Kind.S:
            return synchronisation_ms(task) if synchronisation_ms else 0.0
        return costs.time_ms(task)

    delays = _delays(schedule, order, placement, table, cost_ms)
    timeline = simulate(
        schedule, cost_ms, needs=order, delay_ms=lambda need, task: delays.get((need, task), 0.0) if delays else 0.0
    )
    lanes = {lane.name: lane for lane in schedule.lanes}
    names = [lane_name(rank) for rank in range(placement.ranks)]
    idle_ms = tuple(timeline.idle_ms[name] for name in names)
    sizes = [peak_alive(lanes[name], costs.activation_bytes) for name in names]
    return PipelineTimeline(
        timeline=timeline,
        idle_ms=idle_ms,
        bubble_share=tuple(idle / timeline.makespan_ms if timeline.makespan_ms else 0.0 for idle in idle_ms),
        peak_activations=tuple(int(peak_alive(lanes[name], (1,) * costs.stages)) for name in names),
        peak_bytes=tuple(sizes),
    )


def peak_alive(lane: Lane, sizes: tuple[float, ...]) -> float:
    """The most alive at once on a lane: a stage's size comes with its F and goes with its W.

    Both run on the lane one after another, so this does not depend on times.
    """
    alive = peak = 0.0
    for task in lane.tasks:
        if task.kind is Kind.F:
            alive += sizes[task.layer - 1]
            peak = max(peak, alive)
        elif task.kind is Kind.W:
            alive -= sizes[task.layer - 1]
    return peak


def _delays(
    schedule: Schedule,
    order: dict[Task, tuple[Task, ...]],
    placement: Placement,
    hops: tuple[tuple[float, ...], ...],
    cost_ms: Callable[[Task], float],
) -> dict[tuple[Task, Task], float]:
    """Return the times from the end of a task to the arrival of its message, by sender and reader.

    All messages of a link come from one lane, so they leave in that lane's order.
    """
    if not any(hop_ms for row in hops for hop_ms in row):
        return {}
    lane_of = {task: lane.name for lane in schedule.lanes for task in lane.tasks}
    free = dict.fromkeys((lane.name for lane in schedule.lanes), 0.0)
    link_free: dict[tuple[int, int], float] = {}
    arrival: dict[Task, float] = {}
    end: dict[Task, float] = {}
    delays: dict[tuple[Task, Task], float] = {}
    for task, needs in order.items():
        start = free[lane_of[task]]
        for need in needs:
            there = arrival[need] if _crosses(need, task, placement) else end[need]
            start = max(start, there)
            if there > end[need]:
                delays[need, task] = there - end[need]
        end[task] = free[lane_of[task]] = start + cost_ms(task)
        target = _target(task, placement)
        if target is not None:
            source = placement.rank_of[task.layer - 1]
            arrival[task] = max(end[task], link_free.get((source, target), 0.0)) + hops[source][target]
            link_free[source, target] = arrival[task]
    return delays


def _target(task: Task, placement: Placement) -> int | None:
    """The other rank that a task's result goes to."""
    step = {Kind.F: 1, Kind.O: -1}.get(task.kind)
    if step is None or not 0 <= task.layer - 1 + step < placement.stages:
        return None
    target = placement.rank_of[task.layer - 1 + step]
    return None if target == placement.rank_of[task.layer - 1] else target


def _crosses(need: Task, task: Task, placement: Placement) -> bool:
    """Whether ``task`` reads a message that ``need`` sent."""
    if (need.kind, task.kind) not in ((Kind.F, Kind.F), (Kind.O, Kind.O), (Kind.O, Kind.W)):
        return False
    return placement.rank_of[need.layer - 1] != placement.rank_of[task.layer - 1]
