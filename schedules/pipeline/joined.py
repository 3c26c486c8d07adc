"""Weight gradients that run in one pass with their output gradient, where nobody would begin sooner otherwise.

One pass over a stage's graph takes less than two. A split pays where the rank of the stage before waits for the output
gradient, so each rank's order decides for each stage and micro-batch by itself.
"""

from __future__ import annotations

import math

from retime.schedules.pipeline.costs import Hops, StageCosts, hop_table
from retime.schedules.pipeline.lanes import rank_schedule
from retime.schedules.pipeline.placement import Placement
from retime.schedules.pipeline.simulation import simulate_pipeline
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Kind, Task

__all__ = ["joined_gradients"]


def joined_gradients(schedule: Schedule, placement: Placement, costs: StageCosts, *, hops: Hops = 0.0) -> Schedule:
    """Write W in front of O, as conventional orders do, where W follows O at once and is done before O is needed.

    >>> from retime.schedules.pipeline import StageCosts, block, zb_h1
    >>> order = zb_h1(block(2, 2), 2, first_output_gradient=True)
    >>> str(joined_gradients(order, block(2, 2), StageCosts.uniform(2))).splitlines()[0]
    'rank0: F1@0 F1@1 W1@0 O1@0 W1@1 O1@1'

    Args:
        schedule: a lane a rank, as :func:`simulate_pipeline` takes it.
        placement: which rank holds which stage.
        costs: of the stages.
        hops: see :data:`Hops`.

    Returns:
        A schedule that takes no longer.

    Raises:
        ScheduleError: when the schedule is invalid.
    """
    timeline = simulate_pipeline(schedule, placement, costs, hops=hops).timeline
    table = hop_table(hops, placement.ranks)

    def needed_ms(task: Task) -> float:
        """When the output gradient of a task has to leave, so that who needs it begins no later."""
        for kind in (Kind.O, Kind.W) if task.layer > 1 else ():  # the first stage may have no O
            reader = Task(kind, task.layer - 1, task.micro_batch)
            if reader in timeline.start_ms:
                source, target = (placement.rank_of[one.layer - 1] for one in (task, reader))
                return timeline.start_ms[reader] - table[source][target]
        return math.inf

    lanes = []
    for lane in schedule.lanes:
        tasks = list(lane.tasks)
        for place in range(len(tasks) - 1):
            task, weight = tasks[place : place + 2]
            follows = task.kind is Kind.O and weight == Task(Kind.W, task.layer, task.micro_batch)
            if follows and timeline.end_ms[weight] <= needed_ms(task):
                tasks[place : place + 2] = weight, task
        lanes.append(tasks)
    joined = rank_schedule(lanes)
    longer = simulate_pipeline(joined, placement, costs, hops=hops).makespan_ms > timeline.makespan_ms
    return schedule if longer else joined  # messages that share a link may be in each other's way
