"""Which pipeline schedule is the fastest for given costs: every kind and group size, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from retime.schedules.pipeline.costs import Hops, StageCosts, hop_table
from retime.schedules.pipeline.gpipe import gpipe
from retime.schedules.pipeline.lanes import check_micro_batches, lane_name
from retime.schedules.pipeline.list_scheduler import Cap, Rule, cap_table, least_cap, list_schedule
from retime.schedules.pipeline.one_forward_one_backward import (
    interleaved,
    interleaved_zero_bubble,
    one_forward_one_backward,
    zb_h1,
)
from retime.schedules.pipeline.ooo_pipe import FLUSH, GREEDY
from retime.schedules.pipeline.placement import Placement, block, modulo, v_shape
from retime.schedules.pipeline.simulation import peak_alive, simulate_pipeline
from retime.schedules.pipeline.zbv import zbv
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Kind

_FORWARD_FIRST = (Kind.F, Kind.O, Kind.W)
_LIMITS = 8
"""How many limits of micro-batches in flight are tried where a cap binds."""

_WAITS = (1.0, 2.0, 3.0)
"""Messages that a free rank waits for a more urgent task: two, and an answer to what it has just sent is there."""

_SAME = 1e-9
"""Two makespans this close, relatively, count as equal, and the earlier candidate stays."""


@dataclass(frozen=True)
class Candidate:
    """A schedule that :func:`search` tried.

    Args:
        name: its kind.
        group: stages that stay together under modulo allocation, else ``None``.
        placement: which rank holds which stage.
        schedule: the order.
        makespan_ms: simulated.
        peak_bytes: by rank, the most activations alive, in the unit of :attr:`StageCosts.activation_bytes`.
    """

    name: str
    group: int | None
    placement: Placement
    schedule: Schedule = field(repr=False)
    makespan_ms: float
    peak_bytes: tuple[float, ...]


_Order = Callable[..., Schedule]


def search(
    costs: StageCosts,
    ranks: int,
    micro_batches: int,
    *,
    hops: Hops = 0.0,
    cap: Cap = None,
    first_output_gradient: bool = False,
) -> Candidate:
    """The candidate with the least simulated makespan; of equal ones the first, in the order of :func:`candidates`.

    Args:
        costs: of the stages.
        ranks: how many.
        micro_batches: at least 1.
        hops: see :data:`Hops`.
        cap: see :data:`Cap`.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when a number is out of its range, or no placement fits the cap; the message gives the least cap.
    """
    best: Candidate | None = None
    for candidate in candidates(
        costs, ranks, micro_batches, hops=hops, cap=cap, first_output_gradient=first_output_gradient
    ):
        if best is None or candidate.makespan_ms < best.makespan_ms * (1 - _SAME):
            best = candidate
    if best is None:
        least = min(max(least_cap(placement, costs)) for _, _, placement in _placements(costs, ranks))
        raise ValueError(
            f"cap={cap}: no placement on {ranks} ranks fits; the least feasible cap for all ranks is {least:g}: give "
            "that much, use more ranks, or make the micro-batches smaller"
        )
    return best


def candidates(
    costs: StageCosts,
    ranks: int,
    micro_batches: int,
    *,
    hops: Hops = 0.0,
    cap: Cap = None,
    first_output_gradient: bool = False,
) -> Iterator[Candidate]:
    """Every schedule within the cap: the published orders, then list schedules of each placement.

    Args:
        costs: of the stages.
        ranks: how many.
        micro_batches: at least 1.
        hops: see :data:`Hops`.
        cap: see :data:`Cap`.
        first_output_gradient: see :func:`gpipe`.

    Yields:
        One :class:`Candidate` a kind and placement; of a list schedule the best of the rules tried.
    """
    check_micro_batches(micro_batches)
    for name, group, placement in _placements(costs, ranks):
        try:
            caps = cap_table(cap, placement, costs)
        except ValueError:
            if cap is not None and not isinstance(cap, int | float) and len(cap) != ranks:
                raise
            continue
        for order_name, order in _PUBLISHED[name].items():
            try:
                schedule = order(placement, micro_batches, first_output_gradient=first_output_gradient)
            except ValueError:  # such as micro-batches that do not fill the rounds
                continue
            lanes = {lane.name: lane for lane in schedule.lanes}
            if any(
                peak_alive(lanes[lane_name(rank)], costs.activation_bytes) > caps[rank] * (1 + _SAME)
                for rank in range(ranks)
            ):
                continue
            ran = simulate_pipeline(schedule, placement, costs, hops=hops)
            yield Candidate(order_name, group, placement, schedule, ran.makespan_ms, ran.peak_bytes)
        schedule = fastest_list_schedule(
            placement, micro_batches, costs, hops=hops, cap=cap, first_output_gradient=first_output_gradient
        )
        ran = simulate_pipeline(schedule, placement, costs, hops=hops)
        yield Candidate(_LISTED[name], group, placement, schedule, ran.makespan_ms, ran.peak_bytes)


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

    Args:
        placement: which rank holds which stage.
        micro_batches: at least 1.
        costs: of the stages.
        hops: see :data:`Hops`.
        cap: see :data:`Cap`.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when a number is out of its range or the cap is not feasible.
    """
    caps = cap_table(cap, placement, costs)
    hop_ms = max(map(max, hop_table(hops, placement.ranks)))
    best: tuple[float, Schedule] | None = None
    for rule in _rules(placement.ranks, micro_batches, hop_ms, capped=cap is not None):
        if rule.flush and not _holds(caps, placement, costs, micro_batches):
            continue
        schedule, took_ms = list_schedule(
            placement, micro_batches, costs, hops=hops, cap=cap, rule=rule, first_output_gradient=first_output_gradient
        )
        if best is None or took_ms < best[0] * (1 - _SAME):
            best = took_ms, schedule
    assert best is not None
    return best[1]


def _holds(caps: tuple[float, ...], placement: Placement, costs: StageCosts, micro_batches: int) -> bool:
    """Whether all micro-batches' activations fit at once."""
    return all(cap >= micro_batches * least for cap, least in zip(caps, least_cap(placement, costs), strict=True))


_PUBLISHED: dict[str, dict[str, _Order]] = {
    "block": {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zb_h1": zb_h1},
    "modulo": {"interleaved": interleaved, "interleaved_zero_bubble": interleaved_zero_bubble},
    "v": {"zbv": zbv},
}
_LISTED = {"block": "ooo_pipe1", "modulo": "ooo_pipe2", "v": "ooo_pipe_v"}


def _placements(costs: StageCosts, ranks: int) -> Iterator[tuple[str, int | None, Placement]]:
    stages = costs.stages
    yield "block", None, block(stages, ranks, costs=costs.total_ms)
    if ranks == 1:
        return
    for group in range(1, -(-stages // ranks) + 1):
        if group * (ranks - 1) < stages:
            yield "modulo", group, modulo(stages, ranks, group=group)
    if stages >= 2 * ranks:
        yield "v", None, v_shape(stages, ranks, costs=costs.total_ms)


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
        yield Rule(_FORWARD_FIRST, in_flight=limit)
