"""Out-of-order pipelines: gradient fast-forwarding, then modulo allocation on top (Oh et al. 2022, section 5.2).

:func:`fastest_list_schedule` takes the best of several rules. :func:`joined_gradients` runs weight gradients in one
pass with their output gradient where nobody would begin sooner otherwise: one pass over a stage's graph takes less than
two, and a split pays where the rank of the stage before waits for the output gradient, so each rank's order decides for
each stage and micro-batch by itself.

:func:`synchronised` is reverse-first-k for the stages' data-parallel synchronisation (section 6). Each rank of a
pipeline adds up its stages' weight gradients with the same rank of other pipelines. The next step's first forward pass
waits for stage 1, so the weight gradients of the first k stages go last, stage 1's first of them, while the other
stages keep their fast-forwarded order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from retime.schedules.pipeline.list_scheduler import Cap, Rule, cap_table, least_cap, list_schedule
from retime.schedules.pipeline.placement import Placement, lane_name, modulo, rank_schedule, require_one_chunk
from retime.schedules.pipeline.simulation import Hops, StageCosts, hop_table, simulate_pipeline
from retime.schedules.schedule import Kind, Schedule, Task

FLUSH = Rule((Kind.F, Kind.O, Kind.W), flush=True)
"""The paper's form: on each rank all forward passes, then output gradients, weight gradients in their gaps."""

GREEDY = Rule((Kind.O, Kind.F, Kind.W))
"""An output gradient as soon as it can run, else a forward pass, else a weight gradient."""


def ooo_pipe1(placement: Placement, micro_batches: int | None, *, first_output_gradient: bool = False) -> Schedule:
    """Gradient fast-forwarding: output gradients before weight gradients; Figures 5 (b), 6 (b) and 12 (b).

    >>> from retime.schedules.pipeline import block
    >>> print(ooo_pipe1(block(4, 2), None))
    rank0: F1 F2 O2 W2 W1
    rank1: F3 F4 O4 O3 W4 W3

    Args:
        placement: consecutive stages on each rank.
        micro_batches: at least 1, or ``None`` for one whole batch (cross-layer model parallelism).
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when the placement is no :func:`block`, or a number is out of its range.
    """
    require_one_chunk(placement, "OOO-Pipe1")
    costs = StageCosts.uniform(placement.stages)
    return list_schedule(placement, micro_batches, costs, rule=FLUSH, first_output_gradient=first_output_gradient)[0]


def ooo_pipe2(
    stages: int,
    ranks: int,
    micro_batches: int | None,
    *,
    group: int = 1,
    hops: Hops = 0.0,
    rule: Rule = FLUSH,
    first_output_gradient: bool = False,
) -> Schedule:
    """Fast-forwarding with modulo allocation: Figures 5 (c), 6 (c) and 12 (c).

    >>> print(ooo_pipe2(4, 2, None))
    rank0: F1 F3 O3 W3 W1
    rank1: F2 F4 O4 W4 O2 W2

    Args:
        stages, ranks, group: see :func:`modulo`.
        micro_batches: see :func:`ooo_pipe1`.
        hops: see :data:`Hops`.
        rule: the paper's form when left out; :data:`GREEDY` starts the backward pass sooner.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when a number is out of its range.
    """
    placement, costs = modulo(stages, ranks, group=group), StageCosts.uniform(stages)
    return list_schedule(
        placement, micro_batches, costs, hops=hops, rule=rule, first_output_gradient=first_output_gradient
    )[0]


def fast_forwarded(
    schedule: Schedule,
    placement: Placement,
    micro_batches: int,
    *,
    costs: StageCosts | None = None,
    hops: Hops = 0.0,
    first_output_gradient: bool = False,
) -> Schedule:
    """Gradient fast-forwarding alone: F and O in the given order, weight gradients where their rank would wait.

    What section 8.4.2 of the paper does to Megatron 2, whose orders are :func:`interleaved`.

    >>> from retime.schedules.pipeline import block, gpipe
    >>> print(fast_forwarded(gpipe(block(4, 2), 1), block(4, 2), 1))
    rank0: F1@0 F2@0 O2@0 W2@0 W1@0
    rank1: F3@0 F4@0 O4@0 O3@0 W4@0 W3@0

    Args:
        schedule: of F, O and W, a lane a rank; where its W stand does not matter.
        placement: which rank holds which stage.
        micro_batches: of ``schedule``.
        costs: of the stages; all alike when left out.
        hops: see :data:`Hops`.
        first_output_gradient: whether ``schedule`` lists O1.

    Raises:
        ValueError: when the schedule cannot run, or a number is out of its range.
    """
    costs = costs or StageCosts.uniform(placement.stages)
    return list_schedule(
        placement, micro_batches, costs, hops=hops, first_output_gradient=first_output_gradient, in_order=schedule
    )[0]


_LIMITS = 8
"""How many limits of micro-batches in flight are tried where a cap binds."""

_WAITS = (1.0, 2.0, 3.0)
"""Messages that a free rank waits for a more urgent task: two, and an answer to what it has just sent is there."""

_SAME = 1e-9
"""Two makespans this close, relatively, count as equal, and the earlier rule stays."""


def fastest_list_schedule(
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    *,
    hops: Hops = 0.0,
    cap: Cap = None,
    first_output_gradient: bool = False,
) -> Schedule:
    """The list schedule with the least makespan, of several rules: gradient fast-forwarding on a placement.

    The arguments are those of :func:`list_schedule`.

    Raises:
        ValueError: when a number is out of its range or the cap is not feasible.
    """
    caps = cap_table(cap, placement, costs)
    least = least_cap(placement, costs)
    flushes = all(of_rank >= micro_batches * size for of_rank, size in zip(caps, least, strict=True))  # fit all at once
    hop_ms = max(map(max, hop_table(hops, placement.ranks)))
    best: tuple[float, Schedule] | None = None
    for rule in _rules(placement.ranks, micro_batches, hop_ms, capped=cap is not None):
        if rule.flush and not flushes:
            continue
        schedule, took_ms = list_schedule(
            placement, micro_batches, costs, hops=hops, cap=cap, rule=rule, first_output_gradient=first_output_gradient
        )
        if best is None or took_ms < best[0] * (1 - _SAME):
            best = took_ms, schedule
    assert best is not None
    return best[1]


def _rules(ranks: int, micro_batches: int, hop_ms: float, *, capped: bool) -> Iterator[Rule]:
    yield GREEDY
    for messages in _WAITS if hop_ms else ():
        yield replace(GREEDY, wait_ms=messages * hop_ms)
    yield FLUSH
    if not capped:
        return
    # A cap that is filled with early stages of many micro-batches leaves nothing for late stages of few.
    most = min(micro_batches - 1, 2 * ranks)
    span = range(ranks if most > ranks else max(1, most // 2), most + 1)
    for limit in span[:: max(1, -(-len(span) // _LIMITS))]:
        yield Rule(GREEDY.order, in_flight=limit)
        yield Rule(FLUSH.order, in_flight=limit)


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
    slack_ms = _SAME * timeline.makespan_ms  # sums of the same times in another order
    table = hop_table(hops, placement.ranks)

    def needed_ms(task: Task) -> float:
        """Time at which the output gradient of a task has to leave, so that who needs it begins no later."""
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
            if follows and timeline.end_ms[weight] <= needed_ms(task) + slack_ms:
                tasks[place : place + 2] = weight, task
        lanes.append(tasks)
    joined = rank_schedule(lanes)
    longer = simulate_pipeline(joined, placement, costs, hops=hops).makespan_ms > timeline.makespan_ms + slack_ms
    return schedule if longer else joined  # messages that share a link may be in each other's way


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
        links[f"sync{rank}"] = [Task(Kind.S, stage) for stage in sorted(last, key=last.__getitem__)]
    return Schedule.from_lanes({**lanes, **links})
