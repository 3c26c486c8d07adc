"""The published orders that out-of-order pipelines are compared with.

GPipe (Huang et al. 2019) and cross-layer model parallelism are the conventional orders: Oh et al. 2022, section 5.2,
compare with both in Figures 5 (a), 6 (a) and 12 (a). 1F1B, interleaved 1F1B, ZB-H1 and interleaved zero bubble share
one skeleton, warm-up then forward and backward in turn: Narayanan et al. 2019 (PipeDream) and 2021 (Megatron-LM,
section 2.2.2), and Qi et al. 2023 ("Zero Bubble Pipeline Parallelism", section 2) for the forms that put the weight
gradients off. ZBV is zero bubble on the V placement (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory",
section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from retime.schedules.errors import check_count
from retime.schedules.pipeline.placement import Chunks, Placement, rank_schedule, require_one_chunk, require_turns
from retime.schedules.pipeline.simulation import Hops, PipelineTimeline, StageCosts, simulate_pipeline
from retime.schedules.schedule import Schedule, Task


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
    check_count(micro_batches=micro_batches)
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


def one_forward_one_backward(
    placement: Placement, micro_batches: int, *, first_output_gradient: bool = False
) -> Schedule:
    """1F1B: rank r runs ``ranks - r`` micro-batches ahead, then a backward and a forward pass in turn.

    >>> from retime.schedules.pipeline import block
    >>> print(one_forward_one_backward(block(2, 2), 3))
    rank0: F1@0 F1@1 W1@0 F1@2 W1@1 W1@2
    rank1: F2@0 W2@0 O2@0 F2@1 W2@1 O2@1 F2@2 W2@2 O2@2

    Args:
        placement: consecutive stages on each rank.
        micro_batches: at least 1.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when the placement is no :func:`block` or a number is out of its range.
    """
    require_one_chunk(placement, "1F1B")
    return _in_turn(placement, micro_batches, first_output_gradient, ahead_per_rank=1, split=False)


@dataclass(frozen=True)
class WeightStashing:
    """A pipeline that is never drained.

    Args:
        step_ms: from one update to the next, in steady state.
        versions: by rank, how many versions of its weights it keeps at once.
    """

    step_ms: float
    versions: tuple[int, ...]


def weight_stashing(placement: Placement, micro_batches: int, costs: StageCosts, *, hops: Hops = 0.0) -> WeightStashing:
    """PipeDream: 1F1B without a flush; a micro-batch ends with the version of the weights that it began with.

    No forward pass waits for an update, so that ranks are idle only where messages or uneven stages make them. What is
    trained differs: gradients are of weights that are up to ``versions - 1`` updates old.

    >>> from retime.schedules.pipeline import StageCosts, block
    >>> weight_stashing(block(4, 4), 4, StageCosts.uniform(4))
    WeightStashing(step_ms=12.0, versions=(2, 2, 2, 1))

    Args:
        placement: consecutive stages on each rank.
        micro_batches: between two updates, at least 1.
        costs: of the stages.
        hops: see :data:`Hops`.

    Raises:
        ValueError: when the placement is no :func:`block` or a number is out of its range.
    """
    check_count(micro_batches=micro_batches)

    def run(batches: int) -> PipelineTimeline:
        order = one_forward_one_backward(placement, batches, first_output_gradient=True)
        return simulate_pipeline(order, placement, costs, hops=hops)

    filled = 2 * placement.ranks
    longer = run(filled + micro_batches)
    # Micro-batches whose F has run on a rank and whose W has not; weights change once in ``micro_batches`` of them.
    alive = [-(-peak // len(placement.stages_of(rank))) for rank, peak in enumerate(longer.peak_activations)]
    versions = tuple(1 - (1 - most) // micro_batches for most in alive)
    return WeightStashing(longer.makespan_ms - run(filled).makespan_ms, versions)


def zb_h1(placement: Placement, micro_batches: int, *, first_output_gradient: bool = False) -> Schedule:
    """ZB-H1: 1F1B whose rank r puts off r weight gradients, which fills the bubble at 1F1B's memory.

    >>> from retime.schedules.pipeline import block
    >>> print(zb_h1(block(2, 2), 3))
    rank0: F1@0 F1@1 W1@0 F1@2 W1@1 W1@2
    rank1: F2@0 O2@0 F2@1 O2@1 W2@0 F2@2 O2@2 W2@1 W2@2

    Args:
        placement: consecutive stages on each rank.
        micro_batches: at least 1.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when the placement is no :func:`block` or a number is out of its range.
    """
    require_one_chunk(placement, "ZB-H1")
    return _in_turn(placement, micro_batches, first_output_gradient, ahead_per_rank=1, split=True)


def interleaved(placement: Placement, micro_batches: int, *, first_output_gradient: bool = False) -> Schedule:
    """Interleaved 1F1B: several chunks a rank, ``ranks`` micro-batches through one chunk, then through the next.

    Args:
        placement: the same number of chunks on each rank, in turn, as :func:`modulo` deals them.
        micro_batches: with ``n = max(1, micro_batches // ranks)`` rounds, a multiple of n.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when the placement does not go round or the micro-batches do not fill the rounds.
    """
    _require_rounds(placement, micro_batches, "interleaved 1F1B")
    return _in_turn(placement, micro_batches, first_output_gradient, ahead_per_rank=2, split=False)


def interleaved_zero_bubble(
    placement: Placement, micro_batches: int, *, first_output_gradient: bool = False
) -> Schedule:
    """Interleaved zero bubble: ZB-H1's deferral with several chunks a rank.

    Args:
        placement: see :func:`interleaved`.
        micro_batches: see :func:`interleaved`.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: see :func:`interleaved`.
    """
    _require_rounds(placement, micro_batches, "interleaved zero bubble")
    return _in_turn(placement, micro_batches, first_output_gradient, ahead_per_rank=1, split=True)


def _in_turn(
    placement: Placement, micro_batches: int, first_output_gradient: bool, *, ahead_per_rank: int, split: bool
) -> Schedule:
    """The skeleton.

    Args:
        ahead_per_rank: how many forward passes a rank has begun more than the rank behind it when the backward starts.
        split: put off W, rank r by r passes.
    """
    check_count(micro_batches=micro_batches)
    write = Chunks(placement.chunks, first_output_gradient)
    ranks, chunks = placement.ranks, len(placement.chunks[0])
    per_round = micro_batches // max(1, micro_batches // ranks) if chunks > 1 else 1
    passes = list(_passes(chunks, micro_batches, per_round))
    lanes: list[list[Task]] = []
    for rank in range(ranks):
        ahead = min(len(passes), (chunks - 1) * per_round + ahead_per_rank * (ranks - 1 - rank))
        tasks = [task for chunk, micro_batch in passes[:ahead] for task in write.forward(rank, chunk, micro_batch)]
        put_off = rank if split else 0
        waiting: list[tuple[int, int]] = []
        for turn, (mirrored, micro_batch) in enumerate(passes):
            if ahead + turn < len(passes):
                tasks += write.forward(rank, *passes[ahead + turn])
            chunk = chunks - 1 - mirrored
            if not split:
                tasks += write.backward(rank, chunk, micro_batch)
                continue
            tasks += write.output_gradients(rank, chunk, micro_batch)
            waiting.append((chunk, micro_batch))
            if len(waiting) > put_off:
                tasks += write.weight_gradients(rank, *waiting.pop(0))
        for chunk, micro_batch in waiting:
            tasks += write.weight_gradients(rank, chunk, micro_batch)
        lanes.append(tasks)
    return rank_schedule(lanes)


def _passes(chunks: int, micro_batches: int, per_round: int) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) in the order of the forward passes; the backward passes mirror the chunks."""
    for first in range(0, micro_batches, per_round):
        for chunk in range(chunks):
            for micro_batch in range(first, first + per_round):
                yield chunk, micro_batch


def _require_rounds(placement: Placement, micro_batches: int, schedule: str) -> None:
    check_count(micro_batches=micro_batches)
    chunks = len(placement.chunks[0])
    require_turns(
        placement,
        [*range(placement.ranks)] * chunks,
        schedule,
        "needs the same number of chunks on each rank, dealt out in turn: use modulo() with a group size that divides "
        "the stages of a rank",
    )
    rounds = max(1, micro_batches // placement.ranks)
    if micro_batches % rounds:
        raise ValueError(
            f"micro_batches={micro_batches} do not fill {rounds} rounds over {placement.ranks} ranks: {schedule} takes "
            f"a multiple of {rounds}, such as {micro_batches // rounds * rounds}"
        )


_DOWN, _UP = 0, 1
"""The two chunks of a rank: the one passed on the way to the last rank, and the one on the way back."""


def zbv(placement: Placement, micro_batches: int, *, first_output_gradient: bool = False) -> Schedule:
    """ZBV: two chunks a rank in a V; without a bubble when F, O and W take the same time, at 1F1B's memory.

    The order is laid out for at least ``2 * ranks - 1`` micro-batches; of fewer, the missing ones are left out of it.

    Args:
        placement: a :func:`v_shape`.
        micro_batches: at least 1.
        first_output_gradient: see :func:`gpipe`.

    Raises:
        ValueError: when the placement is no V or a number is out of its range.
    """
    check_count(micro_batches=micro_batches)
    ranks = placement.ranks
    if ranks == 1:
        raise ValueError("ZBV needs at least 2 ranks: on one rank there is no pipeline to fill")
    write = Chunks(_two_chunks(placement), first_output_gradient)
    return rank_schedule(_Rank(write, rank, ranks, micro_batches).tasks for rank in range(ranks))


def _two_chunks(placement: Placement) -> tuple[tuple[range, ...], ...]:
    """The chunks of a V. On the last rank they touch and are one run of stages, which is cut in the middle."""
    require_turns(
        placement,
        [*range(placement.ranks), *range(placement.ranks - 2, -1, -1)],
        "ZBV",
        "needs two chunks a rank, down the ranks and up again: place the stages with v_shape()",
    )
    (run,) = placement.chunks[-1]
    if len(run) < 2:
        raise ValueError(
            "ZBV needs two chunks a rank, and the last rank has one stage: place the stages with v_shape()"
        )
    middle = run.start + (len(run) + 1) // 2
    return (*placement.chunks[:-1], (range(run.start, middle), range(middle, run.stop)))


class _Rank:
    """One rank's tasks, phase by phase."""

    def __init__(self, write: Chunks, rank: int, ranks: int, micro_batches: int) -> None:
        self._write, self._rank, self._wanted = write, rank, micro_batches
        self._laid_out = max(micro_batches, 2 * ranks - 1)
        self._forward = [0, 0]  # passes begun, by chunk
        self._output = [0, 0]
        self._waiting: tuple[deque[int], deque[int]] = (deque(), deque())
        self.tasks: list[Task] = []
        for _ in range(2 * (ranks - rank) - 1):
            self._f(_DOWN)
        for _ in range(rank):
            self._f(_UP)
            self._f(_DOWN)
        for _ in range(ranks - rank):
            self._f(_UP)
            self._o_w(_UP)
        while self._forward[_UP] < self._laid_out:
            self._f(_DOWN)
            self._o_w(_DOWN)
            self._f(_UP)
            self._o_w(_UP)
        for _ in range(rank):
            self._o(_DOWN)
            self._o(_UP)
        for _ in range(ranks - rank):
            self._o(_DOWN)
            self._w(_DOWN)
        for chunk in (_UP, _DOWN):
            while self._waiting[chunk]:
                self._w(chunk)

    def _f(self, chunk: int) -> None:
        micro_batch = self._forward[chunk]
        if micro_batch < self._wanted:
            self.tasks += self._write.forward(self._rank, chunk, micro_batch)
        self._forward[chunk] += micro_batch < self._laid_out

    def _o(self, chunk: int) -> None:
        micro_batch = self._output[chunk]
        self._output[chunk] += 1
        self._waiting[chunk].append(micro_batch)
        if micro_batch < self._wanted:
            self.tasks += self._write.output_gradients(self._rank, chunk, micro_batch)

    def _w(self, chunk: int) -> None:
        micro_batch = self._waiting[chunk].popleft()
        if micro_batch < self._wanted:
            self.tasks += self._write.weight_gradients(self._rank, chunk, micro_batch)

    def _o_w(self, chunk: int) -> None:
        self._o(chunk)
        self._w(chunk)
