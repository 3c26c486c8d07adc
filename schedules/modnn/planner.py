"""The fastest way found to train a batch inside a budget: sub-batch size and schedule together (moDNN, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from retime.schedules.budget import BudgetError, TaskGraph
from retime.schedules.errors import ScheduleError
from retime.schedules.modnn.bounds import (
    SizedGraph,
    alive_bytes,
    largest_feasible,
    regular,
    require_floor,
    select_sub_batch,
    size_graph,
)
from retime.schedules.modnn.device import Direction, OffloadSchedule
from retime.schedules.modnn.offload_schedule import Techniques, offload_schedule
from retime.schedules.modnn.vdnn import vdnn_schedule

_EQUAL_SPLITS = 8
# Simulated times are not exact to half a percent, so bytes moved decide between plans that are as close as that.
_EQUALLY_FAST = 1.005
_SEARCHED = (Techniques("gain"), Techniques("fastest"))
_MOVED = (Direction.OFFLOAD, Direction.PREFETCH)  # every way to train copies the inputs once


@dataclass(frozen=True)
class Candidate:
    """One way to train a batch that the search simulated.

    Args:
        sub_batch: samples a round.
        techniques: of the scheduling.
        batch_ms: simulated time of the whole batch.
        moved_bytes: copied for the batch, inputs' first copies left out.
    """

    sub_batch: int
    techniques: Techniques
    batch_ms: float
    moved_bytes: int


@dataclass(frozen=True)
class BatchPlan:
    """Plan by which a batch is trained inside a budget.

    Args:
        sub_batch: samples of each round; the last one may have fewer.
        round: the schedule of every round but the last, without weight updates; of the only round, with them.
        last: the schedule of the last round, with the weight updates.
        considered: what was simulated, in order.
    """

    batch: int
    sub_batch: int
    round: OffloadSchedule
    last: OffloadSchedule
    considered: tuple[Candidate, ...] = ()

    @property
    def rounds(self) -> int:
        return -(-self.batch // self.sub_batch)

    @property
    def batch_ms(self) -> float:
        """Simulated time of the batch: its rounds one after another, and one update."""
        return (self.rounds - 1) * self.round.finish_ms + self.last.finish_ms

    @property
    def peak_bytes(self) -> int:
        """The highest use of memory, holes included."""
        return max(self.round.peak_bytes, self.last.peak_bytes)

    def moved_bytes(self, *directions: Direction) -> int:
        """Bytes copied for the batch in these directions; offloads and prefetches when none is given."""
        wanted = directions or _MOVED
        return (self.rounds - 1) * self.round.moved_bytes(*wanted) + self.last.moved_bytes(*wanted)


def plan_batch(
    graph: TaskGraph,
    batch: int,
    budget_bytes: int,
    bandwidth_bytes_per_ms: float,
    *,
    techniques: Techniques | None = None,
    sub_batching: bool = True,
    search: bool = True,
    max_simulations: int = 16,
) -> BatchPlan:
    """Plan a batch: the paper's sub-batch size and schedule, then others for as long as one could be faster.

    Candidates are the paper's sub-batch sizes and even splits of the batch, each with Eq. 10 and with the fastest
    algorithms. They are tried in the order of a time that none of them can beat: arithmetic alone, or the transfer of
    what exceeds the budget. Among plans within half a percent of the fastest, the one that moves the fewest bytes wins.

    Args:
        graph: one step, in tasks.
        batch: its samples.
        budget_bytes: for everything, what stays on the device included.
        bandwidth_bytes_per_ms: of transfers between host and device, either way.
        techniques: use these and no others.
        sub_batching: ``False`` keeps the batch whole.
        search: ``False`` stops at the paper's choice: Eq. 8, and :meth:`Techniques.paper` unless ``techniques`` are
            given.
        max_simulations: after so many the best so far is taken.

    Raises:
        BudgetError: the budget is below the floor: of one sample, or of the batch without sub-batching.
        ScheduleError: an argument out of range.
    """
    if batch < 1:
        raise ScheduleError(f"a batch of {batch} samples: give 1 or more")
    require_floor(graph, 1 if sub_batching else batch, budget_bytes, splitting=sub_batching)
    chosen = select_sub_batch(graph, batch, budget_bytes) if sub_batching else batch
    first = (chosen, techniques or Techniques.paper())

    def simulate(samples: int, how: Techniques, update: bool) -> OffloadSchedule:
        return offload_schedule(graph, samples, budget_bytes, bandwidth_bytes_per_ms, how, update=update)

    def finished(samples: int, how: Techniques, considered: list[Candidate]) -> BatchPlan:
        return _rounds(batch, samples, lambda size, update: simulate(size, how, update), considered)

    considered: list[Candidate] = []
    if not search:
        return finished(*first, considered)

    update_ms = _update_ms(graph, batch)

    def consider(samples: int, how: Techniques) -> float:
        considered.append(_estimate(batch, samples, how, update_ms, simulate))
        return considered[-1].batch_ms

    best_ms = consider(*first)
    sizes = _sub_batch_sizes(graph, batch, budget_bytes, chosen) if sub_batching else {batch}
    bounds = sorted((_least_ms(graph, batch, size, budget_bytes, bandwidth_bytes_per_ms), -size) for size in sizes)
    for least_ms, negative_size in bounds:
        for how in (techniques,) if techniques else _SEARCHED:
            if least_ms > best_ms * _EQUALLY_FAST or len(considered) >= max_simulations:
                break
            if (-negative_size, how) != first:
                took_ms = consider(-negative_size, how)
                best_ms = min(best_ms, took_ms)
                if took_ms <= least_ms * _EQUALLY_FAST:
                    break  # other techniques cannot do better with this size
    equally_fast = [candidate for candidate in considered if candidate.batch_ms <= best_ms * _EQUALLY_FAST]
    best = min(equally_fast, key=lambda candidate: (candidate.moved_bytes, candidate.batch_ms))
    return finished(best.sub_batch, best.techniques, considered)


def plan_vdnn(
    graph: TaskGraph,
    batch: int,
    budget_bytes: int,
    bandwidth_bytes_per_ms: float,
    *,
    layers: str = "all",
    algorithms: str = "fastest",
    sub_batching: bool = False,
) -> BatchPlan:
    """vDNN, or with ``sub_batching`` vDNN+: the same with the paper's choice of the sub-batch size (section 7.2).

    Where vDNN+ does not fit with the size of Eq. 8, the next smaller regular one is taken.

    Args:
        layers, algorithms: see :func:`vdnn_schedule`; the others see :func:`plan_batch`.

    Raises:
        BudgetError: it does not fit.
    """

    def simulate(size: int, update: bool) -> OffloadSchedule:
        return vdnn_schedule(
            graph, size, budget_bytes, bandwidth_bytes_per_ms, layers=layers, algorithms=algorithms, update=update
        )

    samples = select_sub_batch(graph, batch, budget_bytes) if sub_batching else batch
    while True:
        try:
            return _rounds(batch, samples, simulate, [])
        except BudgetError:
            if not sub_batching or samples == 1:
                raise
            samples = regular(samples - 1)


def _rounds(
    batch: int, samples: int, simulate: Callable[[int, bool], OffloadSchedule], considered: list[Candidate]
) -> BatchPlan:
    last = simulate((batch - 1) % samples + 1, True)
    full = simulate(samples, False) if samples < batch else last
    return BatchPlan(batch, samples, full, last, tuple(considered))


def _estimate(
    batch: int,
    samples: int,
    how: Techniques,
    update_ms: float,
    simulate: Callable[[int, Techniques, bool], OffloadSchedule],
) -> Candidate:
    """One simulation where the rounds are alike: those before the last take as long less the update."""
    rounds, rest = divmod(batch, samples)
    if rest:
        full, last = simulate(samples, how, False), simulate(rest, how, True)
        batch_ms = rounds * full.finish_ms + last.finish_ms
        moved = rounds * full.moved_bytes(*_MOVED) + last.moved_bytes(*_MOVED)
    else:
        last = simulate(samples, how, True)
        batch_ms = rounds * last.finish_ms - (rounds - 1) * update_ms
        moved = rounds * last.moved_bytes(*_MOVED)
    return Candidate(samples, how, batch_ms, moved)


def _sub_batch_sizes(graph: TaskGraph, batch: int, budget_bytes: int, chosen: int) -> set[int]:
    largest = largest_feasible(graph, batch, budget_bytes)
    splits = {-(-batch // rounds) for rounds in range(1, _EQUAL_SPLITS + 1)}
    steps = {regular(samples) for samples in (*splits, *(1 << power for power in range(batch.bit_length())))}
    return {size for size in {*splits, *steps, chosen} if size <= largest}


def _least_ms(graph: TaskGraph, batch: int, samples: int, budget_bytes: int, bandwidth: float) -> float:
    """A time that no schedule with this sub-batch size can beat."""
    rounds, rest = divmod(batch, samples)
    total_ms = _update_ms(graph, batch)
    for count, size in ((rounds, samples), (1, rest)):
        if size:
            sized = size_graph(graph, size, update=False)
            total_ms += count * _least_round_ms(sized, budget_bytes - sized.resident_bytes, bandwidth)
    return total_ms


def _least_round_ms(sized: SizedGraph, capacity: int, bandwidth: float) -> float:
    """Around each task: what is alive then beyond the capacity has left before it, and comes back after it."""
    inputs = sum(sized.sizes[block] for block in sized.first_use)
    total_ms = least_ms = sized.before_ms[-1]
    for before_ms, alive in zip(sized.before_ms, alive_bytes(sized, "least"), strict=False):
        back_ms = max(0, alive - capacity) / bandwidth
        out_ms = max(0, alive - capacity - inputs) / bandwidth  # the host has the inputs
        least_ms = max(least_ms, max(before_ms, out_ms) + max(total_ms - before_ms, back_ms))
    return least_ms


def _update_ms(graph: TaskGraph, batch: int) -> float:
    """The time of the weight updates."""
    whole, without = size_graph(graph, batch), size_graph(graph, batch, update=False)
    return whole.before_ms[-1] - without.before_ms[-1]
