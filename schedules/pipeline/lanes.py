"""How the schedules of this room write what a rank does: chunks of stages, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from retime.schedules.errors import check_count
from retime.schedules.pipeline.placement import Placement
from retime.schedules.schedule import Schedule
from retime.schedules.tasks import Kind, Task


def lane_name(rank: int) -> str:
    """The lane of a rank's computations."""
    return f"rank{rank}"


def rank_schedule(lanes: Iterable[Iterable[Task]]) -> Schedule:
    """A lane a rank, from rank 0 on."""
    return Schedule.from_lanes({lane_name(rank): tasks for rank, tasks in enumerate(lanes)})


class Chunks:
    """Writes tasks for whole chunks.

    Args:
        chunks: by rank, its runs of consecutive stages, as :attr:`Placement.chunks`.
        first_output_gradient: whether O1 is listed.
    """

    def __init__(self, chunks: tuple[tuple[range, ...], ...], first_output_gradient: bool) -> None:
        self._chunks = chunks
        self._lowest_o = 1 if first_output_gradient else 2

    def forward(self, rank: int, chunk: int, micro_batch: int | None) -> list[Task]:
        """F of each stage."""
        return [Task(Kind.F, stage, micro_batch) for stage in self._chunks[rank][chunk]]

    def output_gradients(self, rank: int, chunk: int, micro_batch: int | None) -> list[Task]:
        """O of each stage, the last first."""
        return [
            Task(Kind.O, stage, micro_batch) for stage in reversed(self._chunks[rank][chunk]) if stage >= self._lowest_o
        ]

    def weight_gradients(self, rank: int, chunk: int, micro_batch: int | None) -> list[Task]:
        """W of each stage, the last first."""
        return [Task(Kind.W, stage, micro_batch) for stage in reversed(self._chunks[rank][chunk])]

    def backward(self, rank: int, chunk: int, micro_batch: int | None) -> list[Task]:
        """The conventional order: both gradients of a stage, then the stage in front of it.

        W stands before O, so that who waits for a stage's output gradient waits for all of its backward pass.
        """
        tasks = []
        for stage in reversed(self._chunks[rank][chunk]):
            tasks.append(Task(Kind.W, stage, micro_batch))
            if stage >= self._lowest_o:
                tasks.append(Task(Kind.O, stage, micro_batch))
        return tasks


def check_micro_batches(micro_batches: int) -> None:
    """Raise an error for less than one micro-batch."""
    check_count(micro_batches=micro_batches)


def require_one_chunk(placement: Placement, schedule: str) -> None:
    """Raise a ValueError unless each rank holds consecutive stages, in the ranks' order."""
    if any(len(chunks) > 1 for chunks in placement.chunks) or list(placement.rank_of) != sorted(placement.rank_of):
        raise ValueError(
            f"{schedule} needs consecutive stages on each rank, in the ranks' order: place them with block()"
        )


def require_turns(placement: Placement, turns: Sequence[int], schedule: str, fix: str) -> None:
    """Raise a ValueError unless the chunks, in forward order, lie on the ranks ``turns``."""
    ordered = sorted((chunk.start, rank) for rank, chunks in enumerate(placement.chunks) for chunk in chunks)
    if [rank for _, rank in ordered] != list(turns):
        raise ValueError(f"{schedule} {fix}")
