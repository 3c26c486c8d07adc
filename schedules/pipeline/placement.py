"""Which rank holds which stage: blocks, modulo allocation (Oh et al. 2022, section 5.2.1) and ZBV's V.

A stage is what a schedule places and orders: one layer, or several consecutive layers that always run together. Behind
the placements: how the schedules of this room write what a rank does with its stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product

from retime.schedules.schedule import Kind, Schedule, Task


@dataclass(frozen=True)
class Placement:
    """The rank of every stage.

    Args:
        rank_of: by stage, in forward order; ``rank_of[0]`` is the rank of stage 1. Ranks count from 0.

    Raises:
        ValueError: when there is no stage, or a rank below the highest has none.
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rank_of:
            raise ValueError("rank_of is empty: give the rank of at least one stage")
        if min(self.rank_of) < 0:
            raise ValueError(f"rank_of has the rank {min(self.rank_of)}: ranks count from 0")
        idle = sorted(set(range(max(self.rank_of))) - set(self.rank_of))
        if idle:
            raise ValueError(f"rank {idle[0]} has no stage: give it one, or number the ranks without a gap")

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return max(self.rank_of) + 1

    @cached_property
    def chunks(self) -> tuple[tuple[range, ...], ...]:
        """Return the runs of consecutive stages that each rank holds, in forward order; stages count from 1."""
        runs: list[list[range]] = [[] for _ in range(self.ranks)]
        first = 1
        for stage in range(1, self.stages + 1):
            if stage == self.stages or self.rank_of[stage] != self.rank_of[stage - 1]:
                runs[self.rank_of[stage - 1]].append(range(first, stage + 1))
                first = stage + 1
        return tuple(map(tuple, runs))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of ``rank`` in forward order, from 1."""
        return tuple(stage for chunk in self.chunks[rank] for stage in chunk)


def block(stages: int, ranks: int, *, costs: Sequence[float] | None = None) -> Placement:
    """Consecutive stages on each rank, the costliest rank as cheap as it can be.

    >>> block(8, 3).rank_of
    (0, 0, 0, 1, 1, 1, 2, 2)

    Args:
        stages: how many; not necessarily a multiple of ``ranks``.
        ranks: how many; each gets at least one stage.
        costs: what a stage costs, such as its F, O and W together; all the same when left out.

    Raises:
        ValueError: when a number is out of its range or ``costs`` is not one a stage.
    """
    _check(stages, ranks)
    return Placement(tuple(rank for rank, size in enumerate(_sizes(stages, ranks, costs)) for _ in range(size)))


def modulo(stages: int, ranks: int, *, group: int = 1) -> Placement:
    """Groups of consecutive stages dealt out to the ranks in turn: modulo allocation (Oh et al. 2022, section 5.2.1).

    The paper allocates layer l to GPU ``l mod n``; Figure 5 (c) starts on the first GPU, as here. Larger groups send
    fewer messages and fill the pipeline later.

    >>> modulo(8, 2).rank_of
    (0, 1, 0, 1, 0, 1, 0, 1)
    >>> modulo(8, 2, group=2).rank_of
    (0, 0, 1, 1, 0, 0, 1, 1)

    Args:
        group: stages a group, so few that every rank gets one.

    Raises:
        ValueError: when a number is out of its range.
    """
    _check(stages, ranks)
    largest = (stages - 1) // (ranks - 1) if ranks > 1 else stages
    if not 1 <= group <= largest:
        raise ValueError(
            f"group={group}: give 1 to {largest}, or some of the {ranks} ranks get none of the {stages} stages"
        )
    return Placement(tuple(stage // group % ranks for stage in range(stages)))


def v_shape(stages: int, ranks: int, *, costs: Sequence[float] | None = None) -> Placement:
    """Two blocks a rank, down the ranks and up again, so that the first and the last stage share rank 0 (ZBV).

    Qi et al. 2024, "Pipeline Parallelism with Controllable Memory".

    >>> v_shape(8, 2).rank_of
    (0, 0, 1, 1, 1, 1, 0, 0)

    Args:
        stages: how many, at least two a rank.
        costs: what a stage costs; all the same when left out.

    Raises:
        ValueError: when a number is out of its range.
    """
    _check(stages, ranks)
    if stages < 2 * ranks:
        raise ValueError(
            f"stages={stages} on ranks={ranks}: a V takes two stages a rank, so split the model into at least "
            f"{2 * ranks}, or use at most {stages // 2} ranks"
        )
    turns = [*range(ranks), *range(ranks - 1, -1, -1)]
    sizes = _sizes(stages, 2 * ranks, costs)
    return Placement(tuple(rank for rank, size in zip(turns, sizes, strict=True) for _ in range(size)))


def even_stages(sizes: Sequence[float], rank_of: Sequence[int]) -> tuple[int, ...]:
    """The stage of each layer, so that the ranks' sums of sizes are as equal as moves of single layers make them.

    >>> even_stages([1] * 6, (0, 1, 0, 1))
    (0, 0, 1, 1, 2, 3)
    >>> even_stages([4, 1, 1, 1, 1, 1, 1], (0, 1, 2))
    (0, 1, 1, 1, 2, 2, 2)

    Args:
        sizes: of the layers, in forward order.
        rank_of: by stage.

    Raises:
        ValueError: when there are more stages than layers.
    """
    stages, layers = len(rank_of), len(sizes)
    if not 1 <= stages <= layers:
        raise ValueError(f"{stages} stages of {layers} layers: give each stage at least one layer, or use fewer stages")
    total = [0, *accumulate(sizes)]

    def unevenness(cuts: tuple[int, ...]) -> tuple[float, float, float]:
        stage_sizes = [total[end] - total[start] for start, end in pairwise(cuts)]
        ranks: list[float] = [0] * (max(rank_of) + 1)
        for rank, size in zip(rank_of, stage_sizes, strict=True):
            ranks[rank] += size
        return max(ranks), sum(size * size for size in ranks), sum(size * size for size in stage_sizes)

    def moved(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """One or two of the cuts by a layer."""
        for places in (*combinations(range(1, stages), 1), *combinations(range(1, stages), 2)):
            for steps in product((-1, 1), repeat=len(places)):
                shifted = list(cuts)
                for place, step in zip(places, steps, strict=True):
                    shifted[place] += step
                if all(start < end for start, end in pairwise(shifted)):
                    yield tuple(shifted)

    best: list[tuple[int, ...]] = []
    for costs in (None, sizes):
        cuts = (0, *accumulate(_sizes(layers, stages, costs)))
        while (better := min(moved(cuts), key=unevenness, default=cuts)) and unevenness(better) < unevenness(cuts):
            cuts = better
        best.append(cuts)
    chosen = min(best, key=unevenness)
    return tuple(stage for stage, (start, end) in enumerate(pairwise(chosen)) for _ in range(start, end))


def _sizes(stages: int, blocks: int, costs: Sequence[float] | None) -> list[int]:
    """Number of stages of each block, so that the largest sum is as small as it can be (dynamic programming).

    Among equal choices the earlier blocks are the larger ones, because the later ones wait longer for their first task.
    """
    costs = [1.0] * stages if costs is None else list(costs)
    if len(costs) != stages:
        raise ValueError(f"costs has {len(costs)} entries for {stages} stages: give one a stage")
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError("costs has an entry that is no duration: give 0 or more for each stage")
    if blocks == stages:
        return [1] * stages
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # least[end]: the smallest possible largest sum of the first `end` stages in the blocks so far
    least: list[float] = total[:]
    cuts: list[list[int]] = []
    for done in range(1, blocks):
        better, cut = [float("inf")] * (stages + 1), [0] * (stages + 1)
        for end in range(done + 1, stages - (blocks - done - 1) + 1):
            for start in range(end - 1, done - 1, -1):
                here = total[end] - total[start]
                if here >= better[end]:
                    break  # a longer last block is no better
                if max(least[start], here) < better[end]:
                    better[end], cut[end] = max(least[start], here), start
        least, cuts = better, [*cuts, cut]
    sizes, end = [], stages
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return [end, *reversed(sizes)]


def _check(stages: int, ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: give 1 or more")
    if stages < ranks:
        raise ValueError(f"stages={stages} on ranks={ranks}: give at least one stage a rank, or use fewer ranks")


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
