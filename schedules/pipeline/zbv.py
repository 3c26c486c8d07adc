"""ZBV: zero bubble on the V placement (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4)."""

from __future__ import annotations

from collections import deque

from retime.schedules.pipeline.lanes import Chunks, check_micro_batches, rank_schedule, require_turns
from retime.schedules.pipeline.placement import Placement
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Task

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
    check_micro_batches(micro_batches)
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
