"""Reverse-first-k for the stages' data-parallel synchronisation (Oh et al. 2022, section 6).

Each rank of a pipeline adds up its stages' weight gradients with the same rank of other pipelines. The next step's
first forward pass waits for stage 1, so the weight gradients of the first k stages go last, stage 1's first of them,
while the other stages keep their fast-forwarded order.
"""

from __future__ import annotations

from retime.schedules.pipeline.lanes import lane_name
from retime.schedules.pipeline.placement import Placement
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Kind, Task


def link_name(rank: int) -> str:
    """The lane of a rank's synchronisation."""
    return f"sync{rank}"


def synchronised(schedule: Schedule, placement: Placement, *, k: int = 0) -> Schedule:
    """Put an S for every stage on a lane beside its rank, and the first k stages' W in reverse.

    Putting W off keeps activations alive: hold the result against the cap with :func:`validate_pipeline`.

    >>> from retime.schedules.pipeline import block, ooo_pipe1
    >>> print(synchronised(ooo_pipe1(block(4, 2), None), block(4, 2), k=2))
    rank0: F1 F2 O2 W1 W2
    rank1: F3 F4 O4 O3 W4 W3
    sync0: S1 S2
    sync1: S4 S3

    Args:
        schedule: a lane a rank, of one step.
        placement: which rank holds which stage.
        k: how many stages, from stage 1 on, over all ranks; 0 leaves the order as it is.

    Raises:
        ValueError: when k is out of its range.
    """
    if not 0 <= k <= placement.stages:
        raise ValueError(f"k={k}: give 0 (nothing deferred) to {placement.stages}, the number of stages")
    lanes: dict[str, list[Task]] = {}
    links: dict[str, list[Task]] = {}
    given = {lane.name: lane.tasks for lane in schedule.lanes}
    for rank in range(placement.ranks):
        tasks = given[lane_name(rank)]
        deferred = [task for task in tasks if task.kind is Kind.W and task.layer <= k]
        kept = [task for task in tasks if not (task.kind is Kind.W and task.layer <= k)]
        ordered = kept + sorted(deferred, key=lambda task: task.layer)
        last = {task.layer: position for position, task in enumerate(ordered) if task.kind is Kind.W}
        lanes[lane_name(rank)] = ordered
        links[link_name(rank)] = [Task(Kind.S, stage) for stage in sorted(last, key=last.__getitem__)]
    return Schedule.from_lanes({**lanes, **links})
