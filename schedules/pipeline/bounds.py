"""How good a pipeline schedule can be: closed forms of the published ones, and a lower bound for any."""

from __future__ import annotations

from typing import Literal

from retime.schedules.pipeline.costs import Hops, StageCosts, check_stages, hop_table
from retime.schedules.pipeline.placement import Placement

Form = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "ooo_pipe1", "ooo_pipe2", "ooo_pipe2_greedy"]


def extra_ms(
    form: Form, ranks: int, forward_ms: float, output_ms: float, weight_ms: float, *, chunks: int = 1
) -> float:
    """Time over the ideal, ``micro_batches * (F + O + W)``, with equal ranks, free messages, and O1 listed.

    GPipe and 1F1B (ranks - 1)(F + O + W), interleaved 1F1B that over the chunks, ZB-H1 (ranks - 1)(F + O - W),
    OOO-Pipe1 (ranks - 1)(F + O), OOO-Pipe2 that over the chunks, and (ranks - 1) F / chunks where output gradients do
    not wait for the last forward pass. They hold for F = O = W and at least as many micro-batches as ranks, that of
    interleaved 1F1B for a multiple of the ranks.

    Args:
        form: which schedule.
        ranks: how many.
        forward_ms: time of a micro-batch's F of all stages of one rank.
        output_ms: the same of O.
        weight_ms: the same of W.
        chunks: how many chunks a rank has.

    Raises:
        ValueError: when the form is none of these.
    """
    both = forward_ms + output_ms
    times = {
        "gpipe": both + weight_ms,
        "1f1b": both + weight_ms,
        "interleaved": (both + weight_ms) / chunks,
        "zb_h1": both - weight_ms,
        "ooo_pipe1": both,
        "ooo_pipe2": both / chunks,
        "ooo_pipe2_greedy": forward_ms / chunks,
    }
    if form not in times:
        raise ValueError(f"form={form!r}: give one of {', '.join(times)}")
    return (ranks - 1) * times[form]


def least_makespan_ms(
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    *,
    hops: Hops = 0.0,
    first_output_gradient: bool = False,
) -> float:
    """A time that no schedule of ``placement`` can be below.

    The longer of a micro-batch's own way (all F, O back to stage 2, then stage 1), and, for each rank, the way to its
    first forward pass with all of the rank's work behind it.

    Args:
        placement: which rank holds which stage.
        micro_batches: at least 1.
        costs: of the stages.
        hops: see :data:`Hops`.
        first_output_gradient: whether O1 is run.
    """
    check_stages(costs, placement)
    table = hop_table(hops, placement.ranks)
    where, stages = placement.rank_of, placement.stages
    arrives = [0.0]
    for stage in range(1, stages):
        arrives.append(arrives[-1] + costs.forward_ms[stage - 1] + table[where[stage - 1]][where[stage]])
    way = arrives[-1] + costs.forward_ms[-1] + sum(costs.output_gradient_ms[1:]) + costs.weight_gradient_ms[0]
    way += sum(table[where[stage]][where[stage - 1]] for stage in range(1, stages))
    if first_output_gradient:
        way += costs.output_gradient_ms[0]
    else:
        costs = StageCosts(
            costs.forward_ms,
            (0.0, *costs.output_gradient_ms[1:]),
            costs.weight_gradient_ms,
        )
    work = [0.0] * placement.ranks
    for stage, total_ms in enumerate(costs.total_ms):
        work[where[stage]] += micro_batches * total_ms
    first = [min(arrives[stage - 1] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
    return max(way, *map(sum, zip(first, work, strict=True)))
