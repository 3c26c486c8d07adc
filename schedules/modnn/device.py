"""The state of the device in a simulated step: which block lies where, what the host holds, what is on its way."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import replace

from retime.schedules.modnn.allocator import Pool, Segment
from retime.schedules.modnn.result import Copy, Direction, Placement
from retime.schedules.modnn.sized import NEVER, SizedGraph
from retime.schedules.modnn.transfer_lane import TransferLane

WORKSPACE = -1
"""The owner of a task's workspace; blocks have numbers from 0."""


class Device:
    """Memory, transfer stream and the blocks' whereabouts.

    Args:
        capacity_bytes: for what moves: the budget less what stays.
        bytes_per_ms: of the transfer stream, either way.
    """

    def __init__(self, sized: SizedGraph, capacity_bytes: int, bytes_per_ms: float) -> None:
        count = len(sized.sizes)
        self.sized = sized
        self.pool = Pool(capacity_bytes)
        self.lane = TransferLane()
        self.copy_ms = [size / bytes_per_ms for size in sized.sizes]
        self.segment: list[Segment | None] = [None] * count
        self.on_host = list(sized.is_input)
        """Whether the host holds the block's value: it is only freed then (section 5.2.1)."""
        self.host_ms = [0.0] * count
        """When that copy is complete."""
        self.ready_ms = [0.0] * count
        """When the block's value on the device is complete: written by a task or copied in."""
        self.next_use = [sized.first_use.get(block, NEVER) for block in range(count)]
        self.unused: dict[int, bool] = {}
        """Blocks on the device that no task has used since they came: criterion 1. True if copied in, else written."""
        self.copies: list[Copy] = []
        self.placements: list[Placement] = []
        self._placed_ms: dict[int, float] = {}
        self._seen: set[int] = set()
        self._vacating: list[tuple[int, int, float]] = []
        self._away = sorted((use, block) for block, use in sized.first_use.items())
        self._deadline_ms: float | None = None
        self.looked_at = 0
        """Blocks away that were looked at so far, for tests."""

    def vacated_ms(self, offset: int, end: int, now_ms: float) -> float:
        """Return from when on these addresses may be written: copies out of them have to be complete."""
        if not self._vacating:
            return now_ms
        self._vacating = [entry for entry in self._vacating if entry[2] > now_ms]
        return max([now_ms, *(ms for low, high, ms in self._vacating if low < end and offset < high)])

    def allocate(self, block: int, now_ms: float) -> float | None:
        """Reserve memory for a block; returns from when on it may be written, or ``None`` when there is no room."""
        segment = self.pool.allocate(self.sized.sizes[block], block)
        if segment is None:
            return None
        self.segment[block] = segment
        if self.on_host[block]:
            del self._away[bisect_left(self._away, (self.next_use[block], block))]
            self._deadline_ms = None
        return self.vacated_ms(segment.offset, segment.end, now_ms)

    def fetch(self, block: int, earliest_ms: float) -> None:
        """Copy a block in, into memory that :meth:`allocate` gave it."""
        size, duration_ms = self.sized.sizes[block], self.copy_ms[block]
        start_ms = self.lane.book(max(earliest_ms, self.host_ms[block]), duration_ms)
        direction = Direction.PREFETCH if block in self._seen else Direction.INPUT
        self._seen.add(block)
        self.copies.append(Copy(self.sized.names[block], direction, start_ms, start_ms + duration_ms, size))
        self.ready_ms[block] = start_ms + duration_ms
        self._placed_ms[block] = start_ms
        self.unused[block] = True

    def offload(self, block: int, now_ms: float) -> float:
        """Let a block leave; returns when its memory is free.

        The copy starts as soon as the block was complete and the stream has a gap, which may lie before ``now_ms``.
        A block that the host holds is only freed.
        """
        self._copy_out(block, self.ready_ms[block])
        gone_ms = max(now_ms, self.host_ms[block])
        self._leave(block, gone_ms)
        self._wait_for_use(block)
        return gone_ms

    def copy_out(self, block: int, earliest_ms: float) -> float:
        """Copy a block to the host and keep it on the device; returns the end of the copy."""
        self._copy_out(block, max(earliest_ms, self.ready_ms[block]))
        return self.host_ms[block]

    def offload_all(self, now_ms: float) -> float:
        """Let every block leave, the first half of a defragmentation; returns when the device is empty."""
        blocks = [segment.owner for segment in self.pool.segments() if segment.owner is not None]
        placed = [block for block in blocks if block in self._placed_ms]
        # What is still being copied in cannot make room before it has arrived.
        empty_ms = max([now_ms, *(self.ready_ms[block] for block in placed), *(entry[2] for entry in self._vacating)])
        for block in placed:
            empty_ms = max(empty_ms, self.offload(block, now_ms))
        for block in blocks:
            self.segment[block] = None
            if block not in placed and self.on_host[block]:  # memory that was claimed for a copy in
                self._wait_for_use(block)
        self._extend_placements(placed, empty_ms)
        self._vacating.clear()
        self.pool.clear()
        return empty_ms

    def made(self, block: int, start_ms: float, end_ms: float) -> None:
        """A task wrote a block for the first time, running from ``start_ms`` to ``end_ms``."""
        self._placed_ms[block] = start_ms
        self._seen.add(block)
        self.ready_ms[block] = end_ms
        self.unused[block] = False

    def rewritten(self, block: int, end_ms: float) -> None:
        """A task changed a block: what the host holds is out of date."""
        self.on_host[block] = False
        self.ready_ms[block] = end_ms

    def finish(self, task: int, end_ms: float) -> None:
        """A task has run: its blocks wait for their next use, and those without one are freed."""
        for block, use in self.sized.next_use[task].items():
            self.next_use[block] = use
            if use == NEVER:
                self._leave(block, end_ms)
                self.on_host[block] = False

    def hold_workspace(self, segment: Segment, name: str, start_ms: float, end_ms: float) -> None:
        """A task used this segment as its workspace; it is free again."""
        self.placements.append(Placement(name, segment.offset, segment.size, start_ms, end_ms))
        self.pool.free(segment)

    def is_away(self, block: int) -> bool:
        """Whether the host alone holds the block's value."""
        return self.on_host[block] and self.segment[block] is None

    def fetch_deadline_ms(self, *, nearest_only: bool) -> float:
        """Return by when copies have to start so that no task waits for what only the host holds.

        The time is that of all tasks run one after another by their fastest algorithms. Infinite when nothing is away.

        Args:
            nearest_only: look at the nearest task that lacks something, not at those further on.
        """
        if self._deadline_ms is None:
            # Every later task has to find its own blocks and those of the tasks before it copied.
            before_ms, copy_ms = self.sized.before_ms, self.copy_ms
            deadline_ms, copies_ms = math.inf, 0.0
            for use, block in self._away:
                if nearest_only and use > self._away[0][0]:
                    break
                copies_ms += copy_ms[block]
                deadline_ms = min(deadline_ms, before_ms[use] - copies_ms)
            self._deadline_ms = deadline_ms
            self.looked_at += len(self._away)
        return self._deadline_ms

    def next_fetch(self) -> int | None:
        """The nearest task that uses a block which only the host holds."""
        return self._away[0][0] if self._away else None

    def _wait_for_use(self, block: int) -> None:
        insort(self._away, (self.next_use[block], block))
        self._deadline_ms = None

    def _copy_out(self, block: int, earliest_ms: float) -> None:
        if self.on_host[block]:
            return
        duration_ms = self.copy_ms[block]
        start_ms = self.lane.book(earliest_ms, duration_ms)
        name, size = self.sized.names[block], self.sized.sizes[block]
        self.copies.append(Copy(name, Direction.OFFLOAD, start_ms, start_ms + duration_ms, size))
        self.on_host[block] = True
        self.host_ms[block] = start_ms + duration_ms

    def _leave(self, block: int, gone_ms: float) -> None:
        segment = self.segment[block]
        assert segment is not None
        start_ms = self._placed_ms.pop(block)
        self.placements.append(
            Placement(self.sized.names[block], segment.offset, segment.size, start_ms, max(start_ms, gone_ms))
        )
        self._vacating.append((segment.offset, segment.end, gone_ms))
        self.pool.free(segment)
        self.segment[block] = None
        self.unused.pop(block, None)

    def _extend_placements(self, placed: list[int], empty_ms: float) -> None:
        count = len(placed)
        self.placements[-count:] = (
            [replace(placement, end_ms=max(placement.end_ms, empty_ms)) for placement in self.placements[-count:]]
            if count
            else []
        )
