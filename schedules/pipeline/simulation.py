"""A pipeline schedule on paper: costs of its stages, times with messages between ranks, live activations, the check."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retime.schedules.errors import ScheduleError
from retime.schedules.pipeline.placement import Placement, lane_name
from retime.schedules.schedule import Kind, Lane, Schedule, Task, execution_order, validate
from retime.schedules.simulate import Timeline, simulate


@dataclass(frozen=True)
class StageCosts:
    """Times and sizes of the stages for one micro-batch, in forward order.

    Args:
        forward_ms: time of F.
        output_gradient_ms: time of O. That of stage 1 counts only in schedules that list O1.
        weight_gradient_ms: time of W.
        activation_bytes: what F keeps alive until W is done; 1 a stage when left out, so that bytes read as stages.

    Raises:
        ValueError: when the four have different lengths, or an entry is negative or not finite.
    """

    forward_ms: tuple[float, ...]
    output_gradient_ms: tuple[float, ...]
    weight_gradient_ms: tuple[float, ...]
    activation_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_ms)
        if not stages:
            raise ValueError("forward_ms is empty: give the time of at least one stage")
        if not self.activation_bytes:
            object.__setattr__(self, "activation_bytes", (1,) * stages)
        for name in ("forward_ms", "output_gradient_ms", "weight_gradient_ms", "activation_bytes"):
            values: tuple[float, ...] = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) != stages:
                raise ValueError(f"{name} has {len(values)} entries, forward_ms has {stages}: give one a stage")
            for stage, value in enumerate(values, 1):
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{name} of stage {stage} is {value}: give 0 or more")

    @classmethod
    def uniform(cls, stages: int) -> StageCosts:
        """All stages alike, F, O and W a millisecond each: the units of the paper's figures."""
        return cls((1,) * stages, (1,) * stages, (1,) * stages)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward_ms)

    @property
    def total_ms(self) -> tuple[float, ...]:
        """F, O and W together, by stage: what :func:`block` balances."""
        return tuple(map(sum, zip(self.forward_ms, self.output_gradient_ms, self.weight_gradient_ms, strict=True)))

    def by_kind(self, kind: Kind) -> tuple[float, ...]:
        """Times of a kind, by stage."""
        times = {Kind.F: self.forward_ms, Kind.O: self.output_gradient_ms, Kind.W: self.weight_gradient_ms}
        if kind not in times:
            raise ValueError(f"a pipeline's stages have times for F, O and W, not for {kind}")
        return times[kind]


Hops = float | Sequence[Sequence[float]]
"""Milliseconds of a message from rank to rank: one number, or ``hops[source][target]``. Each direction of each pair of
ranks is a link of its own, and carries one message at a time."""


def hop_table(hops: Hops, ranks: int) -> tuple[tuple[float, ...], ...]:
    """Return ``hops`` as a table of ``ranks`` x ``ranks``.

    Raises:
        ValueError: when the table has another size, or a time is negative or not finite.
    """
    if isinstance(hops, int | float):
        table = tuple(tuple(0.0 if a == b else float(hops) for b in range(ranks)) for a in range(ranks))
    else:
        # A rank sends itself nothing, whatever stands on the diagonal.
        table = tuple(tuple(0.0 if a == b else float(hop) for b, hop in enumerate(row)) for a, row in enumerate(hops))
        if len(table) != ranks or any(len(row) != ranks for row in table):
            sizes = f"{len(table)} rows of {sorted({len(row) for row in table})}"
            raise ValueError(f"hops has {sizes} entries for {ranks} ranks: give {ranks} x {ranks}, or one number")
    for source, row in enumerate(table):
        for target, hop_ms in enumerate(row):
            if not (math.isfinite(hop_ms) and hop_ms >= 0):
                raise ValueError(
                    f"the hop from rank {source} to rank {target} is {hop_ms}: give 0 or more milliseconds"
                )
    return table


def check_stages(costs: StageCosts, placement: Placement) -> None:
    """Raise a ValueError unless ``costs`` and ``placement`` are about the same number of stages."""
    if costs.stages != placement.stages:
        raise ValueError(
            f"costs are of {costs.stages} stages, the placement has {placement.stages}: describe the same stages"
        )


@dataclass(frozen=True)
class PipelineTimeline:
    """Result of :func:`simulate_pipeline`; the tuples are by rank.

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
        """Time at which the last task ends."""
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
    _check_places(schedule, placement)
    order = execution_order(schedule)

    def cost_ms(task: Task) -> float:
        if task.kind is Kind.S:
            return synchronisation_ms(task) if synchronisation_ms else 0.0
        return costs.by_kind(task.kind)[task.layer - 1]

    delays = _delays(schedule, order, placement, table, cost_ms)
    timeline = simulate(schedule, cost_ms, needs=order, delay_ms=lambda need, task: delays.get((need, task), 0.0))
    lanes = {lane.name: lane for lane in schedule.lanes}
    names = [lane_name(rank) for rank in range(placement.ranks)]
    idle_ms = tuple(timeline.idle_ms[name] for name in names)
    return PipelineTimeline(
        timeline=timeline,
        idle_ms=idle_ms,
        bubble_share=tuple(idle / timeline.makespan_ms if timeline.makespan_ms else 0.0 for idle in idle_ms),
        peak_activations=tuple(int(_peak_alive(lanes[name], (1,) * costs.stages)) for name in names),
        peak_bytes=tuple(_peak_alive(lanes[name], costs.activation_bytes) for name in names),
    )


def _peak_alive(lane: Lane, sizes: tuple[float, ...]) -> float:
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
    """Return whether ``task`` reads a message that ``need`` sent."""
    if (need.kind, task.kind) not in ((Kind.F, Kind.F), (Kind.O, Kind.O), (Kind.O, Kind.W)):
        return False
    return placement.rank_of[need.layer - 1] != placement.rank_of[task.layer - 1]


def validate_pipeline(schedule: Schedule, placement: Placement, micro_batches: int | None) -> None:
    """Check that each F, O and W is there once and on its rank, and that all can run.

    O1 may be listed for all micro-batches or for none.

    >>> from retime.schedules.pipeline import block
    >>> validate_pipeline(Schedule.parse("rank0: F1@0 W1@0\\nrank1: F2@0 W2@0 O2@0 W1@1"), block(2, 2), 1)
    Traceback (most recent call last):
    retime.schedules.errors.ScheduleError: W1@1 is of no micro-batch of 0 to 0
      rank1: F2@0 W2@0 O2@0 W1@1
                            ^^^^ <-- ERROR HERE

    Args:
        schedule: a lane a rank; further lanes may hold S.
        placement: which rank holds which stage.
        micro_batches: how many, or ``None`` for one whole batch.

    Raises:
        ScheduleError: at the first mistake, with its lane and a mark.
    """
    batches: Sequence[int | None] = [None] if micro_batches is None else range(micro_batches)
    _check_places(schedule, placement, batches)
    listed = frozenset(schedule)
    for task in _expected(schedule, placement, batches):
        if task not in listed:
            rank = lane_name(placement.rank_of[task.layer - 1])
            raise ScheduleError(f"{task} is missing: put it on {rank}")
    validate(schedule)


def _check_places(schedule: Schedule, placement: Placement, batches: Sequence[int | None] | None = None) -> None:
    """Check that each rank has its lane, with its own tasks; and, where ``batches`` are given, with no others."""
    names = {lane_name(rank): rank for rank in range(placement.ranks)}
    for lane in schedule.lanes:
        rank = names.pop(lane.name, None)
        for position, task in enumerate(lane.tasks):
            mistake = _mistake(task, rank, placement, batches)
            if mistake:
                raise ScheduleError(f"{task} {mistake}\n{lane.marked(position)}")
    if names:
        raise ScheduleError(f"there is no lane {next(iter(names))}: give each of the {placement.ranks} ranks its lane")


def _mistake(task: Task, rank: int | None, placement: Placement, batches: Sequence[int | None] | None) -> str | None:
    if task.layer > placement.stages:
        return f"is of no stage of 1 to {placement.stages}"
    if rank is None:
        return None if task.kind is Kind.S else "is on no rank's lane: lanes of ranks are called rank0, rank1, ..."
    if task.kind not in (Kind.F, Kind.O, Kind.W):
        return "is no F, O or W: put it on a lane of its own"
    if batches is not None and task.micro_batch not in batches:
        return "is of no micro-batch" + ("" if None in batches else f" of 0 to {len(batches) - 1}")
    home = placement.rank_of[task.layer - 1]
    return None if rank == home else f"is of stage {task.layer}, which the placement gives to {lane_name(home)}"


def lists_first_output_gradient(schedule: Schedule) -> bool:
    """Return whether the first stage has its O, the gradient of the batch."""
    return any(task.kind is Kind.O and task.layer == 1 for task in schedule)


def _expected(schedule: Schedule, placement: Placement, batches: Sequence[int | None]) -> list[Task]:
    lists_o1 = lists_first_output_gradient(schedule)
    return [
        Task(kind, stage, batch)
        for stage in range(1, placement.stages + 1)
        for batch in batches
        for kind in (Kind.F, Kind.O, Kind.W)
        if kind is not Kind.O or stage > 1 or lists_o1
    ]
