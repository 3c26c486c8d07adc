"""GPipe (Huang et al. 2019) and cross-layer model parallelism: the conventional orders.

Oh et al. 2022, section 5.2, compare with both in Figures 5 (a), 6 (a) and 12 (a).
"""

from __future__ import annotations

from retime.schedules.pipeline.lanes import Chunks, check_micro_batches, rank_schedule, require_one_chunk
from retime.schedules.pipeline.placement import Placement
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Task


def gpipe(placement: Placement, micro_batches: int, *, first_output_gradient: bool = False) -> Schedule:
    """All forward passes, then all backward passes, micro-batch 0 first: Figures 6 (a) and 12 (a).

    >>> from retime.schedules.pipeline import block
    >>> print(gpipe(block(2, 2), 2))
    rank0: F1@0 F1@1 W1@0 W1@1
    rank1: F2@0 F2@1 W2@0 O2@0 W2@1 O2@1

    Args:
        placement: consecutive stages on each rank.
        micro_batches: at least 1.
        first_output_gradient: list O1 too: for a first stage of several layers, whose O stands for all but the first.

    Raises:
        ValueError: when the placement is no :func:`block` or a number is out of its range.
    """
    check_micro_batches(micro_batches)
    return _all_forward_all_backward(placement, list(range(micro_batches)), first_output_gradient)


def cross_layer(placement: Placement, *, first_output_gradient: bool = False) -> Schedule:
    """Cross-layer model parallelism: the batch whole, one rank at work at a time: Figure 5 (a).

    Args:
        placement: consecutive stages on each rank.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when the placement is no :func:`block`.
    """
    return _all_forward_all_backward(placement, [None], first_output_gradient)


def _all_forward_all_backward(
    placement: Placement, micro_batches: list[int] | list[None], first_output_gradient: bool
) -> Schedule:
    require_one_chunk(placement, "GPipe")
    write = Chunks(placement.chunks, first_output_gradient)
    lanes: list[list[Task]] = []
    for rank in range(placement.ranks):
        forward = [task for micro_batch in micro_batches for task in write.forward(rank, 0, micro_batch)]
        backward = [task for micro_batch in micro_batches for task in write.backward(rank, 0, micro_batch)]
        lanes.append(forward + backward)
    return rank_schedule(lanes)
