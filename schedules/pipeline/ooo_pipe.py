"""OOO-Pipe1 and OOO-Pipe2: gradient fast-forwarding, then modulo allocation on top (Oh et al. 2022, section 5.2)."""

from __future__ import annotations

from retime.schedules.pipeline.costs import Hops, StageCosts
from retime.schedules.pipeline.lanes import require_one_chunk
from retime.schedules.pipeline.list_scheduler import Rule, list_schedule
from retime.schedules.pipeline.placement import Placement, modulo
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Kind

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
