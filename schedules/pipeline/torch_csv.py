"""The text form of ``torch.distributed.pipelining``, as its runtime dumps and loads it: a row a rank, a cell an action.

``1F0`` is the forward pass of stage 1 for micro-batch 0, ``1I0`` its output gradient (torch's "backward input"),
``1W0`` its weight gradient and ``1B0`` both in one pass. Stages count from 0 there and from 1 here, so ``1F0`` is
``F2@0``.
"""

from __future__ import annotations

import re
from typing import Literal

from retime.schedules.errors import ScheduleError, mark
from retime.schedules.pipeline.placement import Placement, lane_name, rank_schedule
from retime.schedules.pipeline.simulation import lists_first_output_gradient, validate_pipeline
from retime.schedules.schedule import Kind, Schedule, Task

__all__ = ["from_csv", "orders_of", "placement_of", "to_csv"]

_Action = tuple[Literal["F", "O", "W", "B"], int, int]
_LETTERS: dict[Kind, Literal["F", "O", "W"]] = {Kind.F: "F", Kind.O: "O", Kind.W: "W"}
_TORCHS = {"F": "F", "O": "I", "W": "W", "B": "B"}
_KINDS = {"F": (Kind.F,), "I": (Kind.O,), "W": (Kind.W,), "B": (Kind.W, Kind.O)}
_COMPUTES = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})", re.ASCII)
_ADDED = re.compile(r"\d+((SEND|RECV)_[FB]\d+|(UNSHARD|RESHARD|REDUCE_GRAD)\d*)", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B", re.ASCII)


def orders_of(schedule: Schedule) -> dict[int, list[_Action]]:
    """Computations of each rank: kind, stage and micro-batch, both from 0.

    ``"B"`` is one backward pass for both gradients, where W stands right in front of O, as in conventional orders, and
    of the first stage where no O1 is listed.

    Args:
        schedule: a lane a rank.
    """
    lists_o1 = lists_first_output_gradient(schedule)
    orders: dict[int, list[_Action]] = {}
    for rank, lane in enumerate(schedule.lanes):
        order: list[_Action] = []
        for task in lane.tasks:
            place = (task.layer - 1, task.micro_batch or 0)
            if task.kind is Kind.O and order and order[-1] == ("W", *place):
                order[-1] = ("B", *place)
            elif task.kind is Kind.W and task.layer == 1 and not lists_o1:
                order.append(("B", *place))
            else:
                order.append((_LETTERS[task.kind], *place))
        orders[rank] = order
    return orders


def placement_of(schedule: Schedule) -> Placement:
    """Placement of stages on ranks, as the schedule's lanes say.

    Raises:
        ScheduleError: a lane is no rank's or is empty; a stage is on two ranks, or on none.
    """
    rank_of: dict[int, int] = {}
    for rank, lane in enumerate(schedule.lanes):
        if lane.name != lane_name(rank):
            raise ScheduleError(
                f"lane {lane.name!r} stands where {lane_name(rank)!r} belongs: name a lane a rank, in their order"
            )
        if not lane.tasks:
            raise ScheduleError(f"{lane_name(rank)} has no task: give it a stage, or leave it out")
        for position, task in enumerate(lane.tasks):
            home = rank_of.setdefault(task.layer, rank)
            if home != rank:
                raise ScheduleError(
                    f"{task} is of stage {task.layer}, which {lane_name(home)} has\n{lane.marked(position)}"
                )
    if not rank_of:
        raise ScheduleError("there is no task: give each rank its forward and backward passes")
    missing = next((stage for stage in range(1, len(rank_of) + 1) if stage not in rank_of), None)
    if missing is not None:
        raise ScheduleError(f"stage {missing} of {max(rank_of)} is on no rank: number the stages without a gap")
    return Placement(tuple(rank_of[stage] for stage in range(1, len(rank_of) + 1)))


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as ``torch.distributed.pipelining`` loads it, computations only; torch adds the messages.

    Save it to a file for ``_PipelineScheduleRuntime._load_csv(path)``. A weight gradient right in front of its output
    gradient, or of the first stage without one, is a full backward pass.

    >>> from retime.schedules.pipeline import block, zb_h1
    >>> print(to_csv(zb_h1(block(2, 2), 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1I0,1F1,1I1,1W0,1W1

    Args:
        schedule: of one step: a lane a rank called ``rank0``, ``rank1``, ..., with F, O and W of each stage. The whole
            batch is micro-batch 0.

    Raises:
        ScheduleError: it is incomplete, or torch has no word for it: other kinds of task, links, or a W that waits for
            less than its O.
    """
    _check(schedule)
    rows = (
        ",".join(f"{stage}{_TORCHS[kind]}{batch}" for kind, stage, batch in one) for one in orders_of(schedule).values()
    )
    return "".join(f"{row}\n" for row in rows)


def from_csv(text: str) -> Schedule:
    """Read a schedule that ``torch.distributed.pipelining`` has dumped, or that :func:`to_csv` wrote.

    Empty cells are skipped, and so is what torch adds when it loads an order: messages (``0SEND_F0``), and what FSDP
    and gradients of replicas need (``0UNSHARD``, ``0REDUCE_GRAD``). Passes that torch overlaps stand one after the
    other.

    >>> print(from_csv("0F0,0F1,0B0,0B1\\n1F0,1I0,1F1,1I1,1W0,1W1\\n"))
    rank0: F1@0 F1@1 W1@0 O1@0 W1@1 O1@1
    rank1: F2@0 O2@0 F2@1 O2@1 W2@0 W2@1

    Args:
        text: a row a rank; ``"compute_only"`` or ``"compute_comms"`` in torch's words.

    Returns:
        A schedule that lists O1, whose placement is :func:`placement_of`.

    Raises:
        ScheduleError: a cell cannot be read, or the order cannot run; with the place.
    """
    lanes: list[list[Task]] = []
    for rank, row in enumerate(text.strip().splitlines()):
        cells = [cell.strip() for cell in row.split(",")]
        tasks: list[Task] = []
        for place, cell in enumerate(cells):
            try:
                tasks += _tasks(cell)
            except ScheduleError as error:
                shown = [one for one in cells if one]
                where = mark(shown, sum(bool(one) for one in cells[:place]), prefix=f"{lane_name(rank)}: ")
                raise ScheduleError(f"row {rank + 1}, cell {place + 1}: {error}\n{where}") from None
        lanes.append(tasks)
    schedule = rank_schedule(lanes)
    try:
        _check(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{error}\n(torch's 0F0 is F1@0 here: stages count from 1)") from None
    return schedule


def _tasks(cell: str) -> list[Task]:
    overlapped = _OVERLAPPED.fullmatch(cell)
    if overlapped is not None:
        return [task for one in overlapped[1].split(";") for task in _tasks(one.strip())]
    if not cell or _ADDED.fullmatch(cell):
        return []
    match = _COMPUTES.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"cannot read {cell!r}: an action is a stage from 0, one of F, I, W and B, and a micro-batch from 0, such "
            "as 2F0"
        )
    return [Task(kind, int(match[1]) + 1, int(match[3])) for kind in _KINDS[match[2]]]


def _check(schedule: Schedule) -> None:
    """Raise ScheduleError unless torch could run this."""
    placement = placement_of(schedule)
    later = next((task for task in schedule if task.step), None)
    if later is not None:
        raise ScheduleError(f"{later} is of another training step: write one step at a time")
    batches = {task.micro_batch for task in schedule}
    counted = {one for one in batches if one is not None}
    if counted and (None in batches or max(counted) >= len(counted)):
        raise ScheduleError(f"the micro-batches are {_shown(batches)}: number them from 0 on, without a gap")
    validate_pipeline(schedule, placement, len(counted) or None)
    lists_o1 = lists_first_output_gradient(schedule)
    for lane in schedule.lanes:
        done: set[Task] = set()
        for position, task in enumerate(lane.tasks):
            output = Task(Kind.O, task.layer, task.micro_batch)
            needs_output = task.kind is Kind.W and (task.layer > 1 or lists_o1) and output not in done
            if needs_output and lane.tasks[position + 1 : position + 2] != (output,):
                raise ScheduleError(
                    f"{task} runs before {output}, and torch has no weight gradient before its output gradient: put it "
                    f"right in front of {output}, or behind\n{lane.marked(position)}"
                )
            done.add(task)


def _shown(batches: set[int | None]) -> str:
    counted = sorted(one for one in batches if one is not None)
    some = ", ".join(map(str, counted[:8])) + (", ..." if len(counted) > 8 else "")
    return f"{some} and one without a number" if None in batches else some
