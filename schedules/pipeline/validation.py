"""Is a pipeline schedule complete, on the right ranks and free of circles?"""

from __future__ import annotations

from retime.schedules.errors import ScheduleError, mark
from retime.schedules.pipeline.lanes import lane_name
from retime.schedules.pipeline.placement import Placement
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Kind, Task
from retime.schedules.validate import validate


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
    batches = [None] if micro_batches is None else list(range(micro_batches))
    names = {lane_name(rank): rank for rank in range(placement.ranks)}
    for lane in schedule.lanes:
        for position, task in enumerate(lane.tasks):
            mistake = _mistake(task, names.get(lane.name), placement, batches)
            if mistake:
                where = mark([str(one) for one in lane.tasks], position, prefix=f"{lane.name}: ")
                raise ScheduleError(f"{task} {mistake}\n{where}")
    for task in _expected(schedule, placement, batches):
        if task not in schedule:
            rank = lane_name(placement.rank_of[task.layer - 1])
            raise ScheduleError(f"{task} is missing: put it on {rank}")
    validate(schedule)


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
