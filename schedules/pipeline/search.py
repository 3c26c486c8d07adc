"""Gradient fast-forwarding on a placement: the list schedule with the least makespan, of several rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from retime.schedules.pipeline.costs import Hops, StageCosts, hop_table
from retime.schedules.pipeline.list_scheduler import Cap, Rule, cap_table, least_cap, list_schedule
from retime.schedules.pipeline.ooo_pipe import FLUSH, GREEDY
from retime.schedules.pipeline.placement import Placement
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Kind

_FORWARD_FIRST = (Kind.F, Kind.O, Kind.W)
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
