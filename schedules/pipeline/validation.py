"""Is a pipeline schedule complete, on the right ranks, free of circles, and within its cap?"""

from __future__ import annotations

from retime.schedules.errors import ScheduleError, mark
from retime.schedules.pipeline.costs import StageCosts, check_stages
from retime.schedules.pipeline.lanes import lane_name
from retime.schedules.pipeline.list_scheduler import Cap, cap_table
from retime.schedules.pipeline.placement import Placement
from retime.schedules.schedule import Lane, Schedule
from retime.schedules.tasks import Kind, Task
from retime.schedules.validate import validate


def validate_pipeline(
    schedule: Schedule,
    placement: Placement,
    micro_batches: int | None,
    *,
    cap: Cap = None,
    costs: StageCosts | None = None,
) -> None:
    """Check that each F, O and W is there once and on its rank, that all can run, and that the cap holds.

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
        cap: see :data:`Cap`.
        costs: whose ``activation_bytes`` the cap counts; one a stage when left out.

    Raises:
        ScheduleError: at the first mistake, with its lane and a mark.
        ValueError: when the cap is not feasible or the costs are of other stages.
    """
    costs = costs or StageCosts.uniform(placement.stages)
    check_stages(costs, placement)
    caps = cap_table(cap, placement, costs)
    batches = [None] if micro_batches is None else list(range(micro_batches))
    names = {lane_name(rank): rank for rank in range(placement.ranks)}
    for lane in schedule.lanes:
        for position, task in enumerate(lane.tasks):
            mistake = _mistake(task, names.get(lane.name), placement, batches)
            if mistake:
                raise ScheduleError(f"{task} {mistake}\n{_mark(lane, position)}")
    for task in _expected(schedule, placement, batches):
        if task not in schedule:
            rank = lane_name(placement.rank_of[task.layer - 1])
            raise ScheduleError(f"{task} is missing: put it on {rank}")
    validate(schedule)
    for lane in schedule.lanes:
        if lane.name in names:
            _check_cap(lane, caps[names[lane.name]], costs)


def _mistake(task: Task, rank: int | None, placement: Placement, batches: list[int] | list[None]) -> str | None:
    if task.layer > placement.stages:
        return f"is of no stage of 1 to {placement.stages}"
    if rank is None:
        return None if task.kind is Kind.S else "is on no rank's lane: lanes of ranks are called rank0, rank1, ..."
    if task.kind not in (Kind.F, Kind.O, Kind.W):
        return "is no F, O or W: put it on a lane of its own"
    if task.micro_batch not in batches:
        return "is of no micro-batch" + ("" if batches == [None] else f" of 0 to {len(batches) - 1}")
    home = placement.rank_of[task.layer - 1]
    return None if rank == home else f"is of stage {task.layer}, which the placement gives to {lane_name(home)}"


def _expected(schedule: Schedule, placement: Placement, batches: list[int] | list[None]) -> list[Task]:
    lists_o1 = any(task.kind is Kind.O and task.layer == 1 for task in schedule)
    return [
        Task(kind, stage, batch)
        for stage in range(1, placement.stages + 1)
        for batch in batches
        for kind in (Kind.F, Kind.O, Kind.W)
        if kind is not Kind.O or stage > 1 or lists_o1
    ]


def _check_cap(lane: Lane, cap: float, costs: StageCosts) -> None:
    alive = 0.0
    for position, task in enumerate(lane.tasks):
        if task.kind is Kind.F:
            alive += costs.activation_bytes[task.layer - 1]
            if alive > cap * (1 + 1e-9):
                raise ScheduleError(
                    f"{task} makes {alive:g} of activations alive where the cap is {cap:g}: run a W before it\n"
                    f"{_mark(lane, position)}"
                )
        elif task.kind is Kind.W:
            alive -= costs.activation_bytes[task.layer - 1]


def _mark(lane: Lane, position: int) -> str:
    return mark([str(task) for task in lane.tasks], position, prefix=f"{lane.name}: ")
