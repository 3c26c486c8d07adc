"""How deep a schedule is: the number of tasks on its longest chain."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from graphlib import CycleError, TopologicalSorter

from retime.schedules.errors import ScheduleError
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Kind, Task
from retime.schedules.validate import Needs, execution_order


def depth(
    schedule: Schedule,
    resources: Mapping[str, str] | None = None,
    *,
    split_backward: bool = False,
    needs: Needs | None = None,
) -> int:
    """Count the tasks on the longest chain in which each waits for the one before.

    A task waits for what it needs and for its predecessor on its lane. ``O_i`` and ``W_i`` count as one backward node
    of layer i, as an eager framework runs them. Counted so, with updates on a lane of their own, a step of n layers has
    the depths that Jiang et al. 2020 give in section 3: 3n for the baseline, whose first update waits for the last
    gradient, and 2n + 1 for backward fusion, where all updates but one fit beside the backward pass.

    >>> from retime.schedules.fusion import backward_fusion, baseline
    >>> depth(baseline(5), {"U": "update"}), depth(backward_fusion(5), {"U": "update"})
    (15, 11)

    Args:
        schedule: one or several steps.
        resources: which kinds run on a lane of their own; only for a schedule of one lane.
        split_backward: count ``O_i`` and ``W_i`` as two nodes, which out-of-order schedules need.
        needs: what each task needs, for a model that is no chain of layers.

    Raises:
        ScheduleError: when the schedule is invalid, or ``O_i`` and ``W_i`` stand too far apart to be one node.
    """
    if resources is not None:
        schedule = schedule.split(resources)
    order = execution_order(schedule, needs)
    before = {task: set(task_needs) for task, task_needs in order.items()}
    for lane in schedule.lanes:
        for earlier, later in zip(lane.tasks, lane.tasks[1:], strict=False):
            before[later].add(earlier)

    node_of: dict[Task, Hashable] = {task: task if split_backward else _node(task) for task in order}
    members: dict[Hashable, set[Task]] = {}
    for task, node in node_of.items():
        members.setdefault(node, set()).add(task)
    edges = {
        node: {node_of[need] for task in tasks for need in before[task]} - {node} for node, tasks in members.items()
    }

    length: dict[Hashable, int] = {}
    try:
        for node in TopologicalSorter(edges).static_order():
            length[node] = 1 + max((length[earlier] for earlier in edges[node]), default=0)
    except CycleError as error:
        layers = {task.layer for node in error.args[1] for task in members[node] if len(members[node]) > 1}
        raise ScheduleError(
            f"O and W of layer {min(layers)} stand so far apart that they are no single node: the tasks between them "
            "wait for the one and the other waits for these tasks. Count them apart with split_backward=True"
        ) from None
    return max(length.values(), default=0)


def _node(task: Task) -> Hashable:
    if task.kind in (Kind.O, Kind.W):
        return ("B", task.layer, task.micro_batch, task.step)
    return task
