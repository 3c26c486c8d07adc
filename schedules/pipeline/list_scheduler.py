"""A list scheduler for pipelines: each rank that is free takes the most urgent task that is ready.

List scheduling with the priorities of gradient fast-forwarding (Oh et al. 2022, section 5.2.1): output gradients before
weight gradients. Activations live from F to W; under a cap a forward pass starts only if every micro-batch that has
begun can still be finished, one after another, in what is left (the banker's algorithm), so no cap makes ranks wait for
each other for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from retime.schedules.errors import check_count
from retime.schedules.pipeline.placement import Placement, rank_schedule
from retime.schedules.pipeline.simulation import Hops, StageCosts, check_stages, hop_table
from retime.schedules.schedule import Kind, Schedule, Task

Cap = float | Sequence[float] | None
"""The most activations that a rank may keep alive, in the unit of :attr:`StageCosts.activation_bytes`: one number for
all ranks, or one a rank; ``None`` for no cap."""

_ROUNDING = 1e-9
"""Sums of sizes may differ by their rounding, relative to the cap."""


@dataclass(frozen=True)
class Rule:
    """Rule by which the list scheduler decides between tasks that are ready.

    Among forward passes the deepest stage comes first, among gradients the earliest micro-batch.

    Args:
        order: the kinds, the most urgent first.
        flush: no backward on a rank before all of its forward passes: the paper's form, which keeps the activations
            of all micro-batches alive.
        in_flight: how many micro-batches may be between their first forward pass and their last weight gradient.
        wait_ms: how long a free rank waits for a more urgent task that is on its way, instead of beginning one that is
            ready: a task that has begun is not interrupted, so what comes just behind its beginning waits for it all.
    """

    order: tuple[Kind, ...] = (Kind.O, Kind.F, Kind.W)
    flush: bool = False
    in_flight: int | None = None
    wait_ms: float = 0.0


def list_schedule(
    placement: Placement,
    micro_batches: int | None,
    costs: StageCosts,
    *,
    hops: Hops = 0.0,
    cap: Cap = None,
    rule: Rule | None = None,
    first_output_gradient: bool = False,
    in_order: Schedule | None = None,
) -> tuple[Schedule, float]:
    """Order the tasks of a pipeline by simulating it.

    Args:
        placement: which rank holds which stage.
        micro_batches: at least 1, or ``None`` for one whole batch, whose tasks carry no micro-batch.
        costs: of the stages.
        hops: see :data:`Hops`.
        cap: see :data:`Cap`.
        rule: how to decide; the default :class:`Rule` when left out.
        first_output_gradient: see :func:`gpipe`.
        in_order: gives each rank's order of F and O, in which they stay; a rank that would wait for the next of them
            runs a W. It takes no cap and no rule.

    Returns:
        The schedule, and its makespan in milliseconds. Under a cap or a limit of micro-batches in flight, ranks wait
        for each other's memory while the order is found; running it (:func:`simulate_pipeline`) may be faster.

    Raises:
        ValueError: when a number is out of its range, or the cap is below what one micro-batch takes; the message gives
            the least feasible cap; or ``in_order`` cannot run, or comes with a cap or a rule.
    """
    check_stages(costs, placement)
    check_count(micro_batches=1 if micro_batches is None else micro_batches)
    rule = rule or Rule()
    if sorted(rule.order) != sorted((Kind.F, Kind.O, Kind.W)):
        raise ValueError(f"order={rule.order}: give F, O and W, each once")
    if rule.wait_ms < 0:
        raise ValueError(f"wait_ms={rule.wait_ms}: give 0 or more milliseconds")
    if rule.in_flight is not None and (rule.in_flight < 1 or rule.flush):
        why = "the flush form has all micro-batches in flight" if rule.flush else "give 1 or more, or None for no limit"
        raise ValueError(f"in_flight={rule.in_flight}: {why}")
    if in_order is not None and (cap is not None or rule != Rule()):
        raise ValueError("in_order says what runs: leave out cap and rule")
    caps = cap_table(cap, placement, costs, kept=(micro_batches or 1) if rule.flush else 1)
    given = None if in_order is None else _without_weights(in_order, placement.ranks)
    run = _Run(
        placement, micro_batches or 1, costs, hop_table(hops, placement.ranks), caps, rule, first_output_gradient, given
    )
    tasks = (micro_batches or 1) * (3 * placement.stages - (not first_output_gradient))
    if given is not None and (any(given) or sum(map(len, run.lanes)) < tasks):
        raise ValueError("in_order cannot run: its ranks wait for one another, or it lacks tasks or has others")
    named = [
        [Task(kind, stage + 1, None if micro_batches is None else batch) for kind, stage, batch in lane]
        for lane in run.lanes
    ]
    return rank_schedule(named), run.now


def least_cap(placement: Placement, costs: StageCosts) -> tuple[float, ...]:
    """Return the least feasible cap by rank: all activations of one micro-batch, live when backward begins."""
    return tuple(
        sum(costs.activation_bytes[stage - 1] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)
    )


def cap_table(cap: Cap, placement: Placement, costs: StageCosts, *, kept: int = 1) -> tuple[float, ...]:
    """Return ``cap`` as one number a rank, infinite without a cap.

    Args:
        cap: see :data:`Cap`.
        placement: which rank holds which stage.
        costs: whose ``activation_bytes`` the cap counts.
        kept: how many micro-batches have to be alive at once.

    Raises:
        ValueError: when it has another length, or is not feasible.
    """
    if cap is None:
        return (float("inf"),) * placement.ranks
    caps = (float(cap),) * placement.ranks if isinstance(cap, int | float) else tuple(map(float, cap))
    if len(caps) != placement.ranks:
        raise ValueError(f"cap has {len(caps)} entries for {placement.ranks} ranks: give one a rank, or one number")
    least = tuple(kept * size for size in least_cap(placement, costs))
    what = "one micro-batch keeps alive" if kept == 1 else f"the flush form keeps alive of {kept} micro-batches"
    fix = "make the micro-batches smaller" if kept == 1 else "take a rule without flush"
    for rank, (given, needed) in enumerate(zip(caps, least, strict=True)):
        if not given >= needed * (1 - _ROUNDING):
            raise ValueError(
                f"cap={given:g} on rank {rank} is below what {what} there: the least feasible cap is "
                f"{needed:g} on this rank, and {max(least):g} for all; give that much, or {fix}"
            )
    return caps


_Cell = tuple[Kind, int, int]  # kind, stage from 0, micro-batch


def _urgency(kind: Kind, stage: int, batch: int) -> tuple[int, int]:
    """Key that decides within a kind: the least comes first."""
    return (-stage, batch) if kind is Kind.F else (batch, -stage)


def _without_weights(schedule: Schedule, ranks: int) -> list[list[_Cell]]:
    """By rank, its F and O, the first one last; none for a rank without a lane."""
    return [
        [(task.kind, task.layer - 1, task.micro_batch or 0) for task in reversed(tasks) if task.kind is not Kind.W]
        for tasks in (*(lane.tasks for lane in schedule.lanes), *[()] * (ranks - len(schedule.lanes)))
    ]


class _Run:
    """The simulation; ``lanes`` and ``now`` are what it found."""

    def __init__(
        self,
        placement: Placement,
        micro_batches: int,
        costs: StageCosts,
        hops: tuple[tuple[float, ...], ...],
        caps: tuple[float, ...],
        rule: Rule,
        first_output_gradient: bool,
        given: list[list[_Cell]] | None,
    ) -> None:
        self._rank_of, self._ranks, self._stages = placement.rank_of, placement.ranks, placement.stages
        self._batches, self._rule, self._hops = micro_batches, rule, hops
        self._given = given  # by rank, what is left of its order of F and O, the next one last
        self._time = {kind: costs.by_kind(kind) for kind in rule.order}
        self._lowest_o = 0 if first_output_gradient else 1
        self._size, self._caps = costs.activation_bytes, caps
        self._live = [0.0] * self._ranks
        total = least_cap(placement, costs)
        self._held = [[0.0] * micro_batches for _ in range(self._ranks)]
        self._lacks = [[total[rank]] * micro_batches for rank in range(self._ranks)]
        self._weights_left = [self._stages] * micro_batches
        self._oldest, self._newest = 0, -1  # the micro-batches that have begun and are not all done lie between
        self._begun = 0
        self._forwards_left = [micro_batches * len(placement.stages_of(rank)) for rank in range(self._ranks)]
        self._ready: list[dict[Kind, list[tuple[tuple[int, int], int, int]]]] = [
            {kind: [] for kind in rule.order} for _ in range(self._ranks)
        ]
        self._link_free: dict[tuple[int, int], float] = {}
        # By rank: tasks that a running task of another rank leads to, and when they will be there.
        self._coming: list[dict[_Cell, float]] = [{} for _ in range(self._ranks)]
        self._events: list[tuple[float, int, int, _Cell | None, int]] = []  # time, number, rank, what ended, -1 or 0
        self._count = 0
        self._running: list[_Cell | None] = [None] * self._ranks
        self._blocked = False  # whether a rank stands still with forward passes that were not admitted
        self.lanes: list[list[_Cell]] = [[] for _ in range(self._ranks)]
        self.now = 0.0
        for batch in range(micro_batches):
            self._offer(Kind.F, 0, batch)
        self._simulate()

    def _simulate(self) -> None:
        self._wake(range(self._ranks))
        while self._events:
            self.now = self._events[0][0]
            woken: set[int] = set()
            while self._events and self._events[0][0] == self.now:
                _, _, rank, cell, arrived = heapq.heappop(self._events)
                woken.add(rank)
                if cell is None:
                    continue
                if arrived:
                    self._offer(*cell)
                else:
                    self._running[rank] = None
                    self._ended(rank, cell)
            # A micro-batch that is done, or that begins, changes what the others may do.
            self._wake(range(self._ranks) if self._blocked else woken)

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in sorted(ranks):
            if self._running[rank] is None:
                self._start(rank)
        self._blocked = any(
            cell is None and ready[Kind.F] for cell, ready in zip(self._running, self._ready, strict=True)
        )

    def _start(self, rank: int) -> None:
        cell = self._most_urgent(rank) if self._given is None else self._next_given(rank)
        if cell is None:
            return
        self._running[rank] = cell
        self.lanes[rank].append(cell)
        end = self.now + self._time[cell[0]][cell[1]]
        self._post(end, rank, cell, arrived=0)
        self._announce(rank, cell, end)

    def _most_urgent(self, rank: int) -> _Cell | None:
        ready = self._ready[rank]
        for kind in self._rule.order:
            if not ready[kind]:
                if self._comes_soon(rank, kind):
                    return None
                continue
            if kind is Kind.F:
                cell = self._admitted(rank)
            elif self._rule.flush and self._forwards_left[rank]:
                cell = None
            else:
                _, stage, batch = heapq.heappop(ready[kind])
                cell = (kind, stage, batch)
            if cell is not None:
                return cell
        return None

    def _next_given(self, rank: int) -> _Cell | None:
        """Return the next F or O of the given order if it is ready, else the weight gradient that is most urgent."""
        assert self._given is not None
        ready, given = self._ready[rank], self._given[rank]
        if given:
            kind, stage, batch = given[-1]
            entry = (_urgency(kind, stage, batch), stage, batch)
            if entry in ready.get(kind, ()):
                ready[kind].remove(entry)
                heapq.heapify(ready[kind])
                return given.pop()
        if not ready[Kind.W]:
            return None
        _, stage, batch = heapq.heappop(ready[Kind.W])
        return Kind.W, stage, batch

    def _announce(self, rank: int, cell: _Cell, end: float) -> None:
        """Note when the task that follows on another rank will be there."""
        if not self._rule.wait_ms:
            return
        kind, stage, batch = cell
        if kind is Kind.F and stage + 1 < self._stages:
            follows: _Cell = (Kind.F, stage + 1, batch)
        elif kind is Kind.O and stage > self._lowest_o:
            follows = (Kind.O, stage - 1, batch)
        else:
            return
        target = self._rank_of[follows[1]]
        if target != rank:
            self._coming[target][follows] = end + self._hops[rank][target]

    def _comes_soon(self, rank: int, kind: Kind) -> bool:
        if self._rule.flush:
            return False
        latest = self.now + self._rule.wait_ms
        return any(cell[0] is kind and self.now < time <= latest for cell, time in self._coming[rank].items())

    def _admitted(self, rank: int) -> _Cell | None:
        """Take the most urgent forward pass that leaves every micro-batch that has begun a way to its end."""
        heap = self._ready[rank][Kind.F]
        refused: list[tuple[tuple[int, int], int, int]] = []
        cell: _Cell | None = None
        while heap:
            entry = heapq.heappop(heap)
            _, stage, batch = entry
            if self._safe(rank, stage, batch):
                cell = (Kind.F, stage, batch)
                break
            refused.append(entry)
        for entry in refused:
            heapq.heappush(heap, entry)
        if cell is not None:
            _, stage, batch = cell
            self._forwards_left[rank] -= 1
            self._live[rank] += self._size[stage]
            self._held[rank][batch] += self._size[stage]
            self._lacks[rank][batch] -= self._size[stage]
            if stage == 0:
                self._begun += 1
                self._newest = max(self._newest, batch)
        return cell

    def _safe(self, rank: int, stage: int, batch: int) -> bool:
        if stage == 0 and self._rule.in_flight is not None and self._begun >= self._rule.in_flight:
            return False
        cap = self._caps[rank]
        if cap == float("inf"):
            return True
        size, reserved, lacks = self._size[stage], self._held[rank], self._lacks[rank]
        left = cap - self._live[rank] - size + cap * _ROUNDING
        if left < 0:
            return False
        # Finish the micro-batches in their order: each needs what it lacks here, and gives back what it holds.
        for other in range(self._oldest, max(self._newest, batch) + 1):
            mine = size if other == batch else 0.0
            if lacks[other] - mine > left:
                return False
            left += reserved[other] + mine
        return True

    def _ended(self, rank: int, cell: _Cell) -> None:
        kind, stage, batch = cell
        last = self._stages - 1
        if kind is Kind.F:
            if stage < last:
                self._send(rank, (Kind.F, stage + 1, batch))
            else:
                self._offer(Kind.O if stage >= self._lowest_o else Kind.W, stage, batch)
        elif kind is Kind.O:
            self._offer(Kind.W, stage, batch)
            if stage > 0:
                if stage - 1 >= self._lowest_o:
                    self._send(rank, (Kind.O, stage - 1, batch))
                else:
                    self._send(rank, (Kind.W, stage - 1, batch))
        else:
            self._live[rank] -= self._size[stage]
            self._held[rank][batch] -= self._size[stage]
            self._weights_left[batch] -= 1
            if not self._weights_left[batch]:
                self._begun -= 1
            while self._oldest < self._batches and not self._weights_left[self._oldest]:
                self._oldest += 1

    def _offer(self, kind: Kind, stage: int, batch: int) -> None:
        self._coming[self._rank_of[stage]].pop((kind, stage, batch), None)
        heapq.heappush(self._ready[self._rank_of[stage]][kind], (_urgency(kind, stage, batch), stage, batch))

    def _send(self, source: int, cell: _Cell) -> None:
        target = self._rank_of[cell[1]]
        if target == source:
            self._offer(*cell)
            return
        link = (source, target)
        arrival = max(self.now, self._link_free.get(link, 0.0)) + self._hops[source][target]
        self._link_free[link] = arrival
        if arrival == self.now:
            # Nothing is in between: the target decides with it in sight.
            self._offer(*cell)
            self._post(self.now, target, None, arrived=0)
            return
        self._post(arrival, target, cell, arrived=1)

    def _post(self, time: float, rank: int, cell: _Cell | None, *, arrived: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, rank, cell, arrived))
