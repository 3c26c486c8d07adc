"""A simulated step: what it did, and the device while it runs: which block lies where, and what is on its way."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from retime.schedules.modnn.bounds import NEVER, SizedAlgorithm, SizedGraph
from retime.schedules.modnn.resources import Pool, Segment, TransferLane
from retime.schedules.timeline import Span

COMPUTE, TRANSFER = "compute", "transfer"
"""The two lanes: the paper's Strm_C and Strm_D."""


class Direction(StrEnum):
    """Reason why a block is copied."""

    OFFLOAD = "offload"
    """Device to host."""
    PREFETCH = "prefetch"
    """Host to device, of a block that was on the device before."""
    INPUT = "input"
    """Host to device, the first time: every way to train has to do it."""


@dataclass(frozen=True)
class Copy:
    """One transfer."""

    block: str
    direction: Direction
    start_ms: float
    end_ms: float
    bytes: int


@dataclass(frozen=True)
class Placement:
    """A stretch of the device's memory and the time for which a block, or a task's workspace, holds it."""

    name: str
    offset: int
    bytes: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Stall:
    """A task that waited for the transfer stream."""

    task: str
    ms: float


@dataclass(frozen=True)
class OffloadSchedule:
    """One round through the model: what runs, what is copied and where everything lies.

    Args:
        samples: the sub-batch size.
        budget_bytes: what it was made for.
        finish_ms: when the last task ends, in milliseconds from the start of the round.
        start_ms: by task, when it starts.
        compute_ms: the time of all tasks with the algorithms chosen; the rest of ``finish_ms`` is waiting.
        stalls: the tasks that waited.
        algorithms: by task with more than one algorithm, the name of the one it runs by.
        copies: all transfers, by start.
        placements: what lay where, by start.
        defragmentations: tasks before which everything was offloaded, because the free memory was in pieces.
        resident_bytes: what stays in device memory throughout.
        peak_bytes: with ``resident_bytes`` and the holes between blocks: never above the budget.
        live_peak_bytes: the same without the holes.
    """

    samples: int
    budget_bytes: int
    finish_ms: float
    start_ms: Mapping[str, float]
    compute_ms: float
    stalls: tuple[Stall, ...]
    algorithms: Mapping[str, str]
    copies: tuple[Copy, ...]
    placements: tuple[Placement, ...]
    defragmentations: tuple[str, ...]
    resident_bytes: int
    peak_bytes: int
    live_peak_bytes: int
    spans: tuple[Span, ...]
    """Boxes for :func:`retime.schedules.write_png` and :func:`retime.schedules.write_chrome_trace`."""

    @property
    def stall_ms(self) -> float:
        """Waiting time of all tasks together."""
        return self.finish_ms - self.compute_ms

    def moved_bytes(self, *directions: Direction) -> int:
        """Bytes copied in these directions; all of them when none is given."""
        wanted = directions or tuple(Direction)
        return sum(copy.bytes for copy in self.copies if copy.direction in wanted)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The blocks that leave the device and come back, once each, in the order in which they first leave."""
        names = (copy.block for copy in self.copies if copy.direction is Direction.OFFLOAD)
        return tuple(dict.fromkeys(names))


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
        gone_ms = max(now_ms, self.copy_out(block))
        self._leave(block, gone_ms)
        self._wait_for_use(block)
        return gone_ms

    def copy_out(self, block: int, earliest_ms: float = 0.0) -> float:
        """Copy a block to the host, which may hold it, and keep it on the device; returns the end of the copy."""
        if not self.on_host[block]:
            duration_ms = self.copy_ms[block]
            start_ms = self.lane.book(max(earliest_ms, self.ready_ms[block]), duration_ms)
            name, size = self.sized.names[block], self.sized.sizes[block]
            self.copies.append(Copy(name, Direction.OFFLOAD, start_ms, start_ms + duration_ms, size))
            self.on_host[block] = True
            self.host_ms[block] = start_ms + duration_ms
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
        for place in range(len(self.placements) - len(placed), len(self.placements)):
            placement = self.placements[place]
            self.placements[place] = replace(placement, end_ms=max(placement.end_ms, empty_ms))
        self._vacating.clear()
        self.pool.clear()
        return empty_ms

    def write(self, task: int, start_ms: float, end_ms: float) -> None:
        """A task runs from ``start_ms`` to ``end_ms``: it makes blocks and uses others, some of which it rewrites."""
        for block in self.sized.makes[task]:
            self._placed_ms[block] = start_ms
            self._seen.add(block)
            self.ready_ms[block] = end_ms
            self.unused[block] = False
        for block in self.sized.needs[task]:
            self.unused.pop(block, None)
        for block in self.sized.rewrites[task]:
            self.on_host[block] = False  # what the host holds is out of date
            self.ready_ms[block] = end_ms

    def finish(self, task: int, start_ms: float, end_ms: float, workspace: Segment | None) -> None:
        """A task has run: its blocks wait for their next use; those without one, and its workspace, are freed."""
        if workspace:
            name = f"workspace of {self.sized.tasks[task].name}"
            self.placements.append(Placement(name, workspace.offset, workspace.size, start_ms, end_ms))
            self.pool.free(workspace)
        for block, use in self.sized.next_use[task].items():
            self.next_use[block] = use
            if use == NEVER:
                self._leave(block, end_ms)
                self.on_host[block] = False

    def is_away(self, block: int) -> bool:
        """Return whether the host alone holds the block's value."""
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


class RunLog:
    """Written by a simulator while it runs."""

    def __init__(self, sized: SizedGraph, budget_bytes: int) -> None:
        self.sized = sized
        self.budget_bytes = budget_bytes
        self._compute_ms = 0.0
        self._spans: list[Span] = []
        self._stalls: list[Stall] = []
        self._algorithms: dict[str, str] = {}
        self._defragmentations: list[str] = []

    def stalled(self, task: int, waited_ms: float) -> None:
        """A task started so much after the stream of tasks was free."""
        if waited_ms > 0:
            self._stalls.append(Stall(self.sized.tasks[task].name, waited_ms))

    def defragmented(self, task: int) -> None:
        """Everything left the device before this task."""
        self._defragmentations.append(self.sized.tasks[task].name)

    def ran(self, task: int, start_ms: float, end_ms: float, algorithm: SizedAlgorithm) -> None:
        """A task ran."""
        described = self.sized.tasks[task]
        self._compute_ms += algorithm.ms
        self._spans.append(Span(described.name, COMPUTE, start_ms, end_ms - start_ms, described.phase.value))
        if len(self.sized.algorithms[task]) > 1:
            self._algorithms[described.name] = algorithm.name

    def result(self, device: Device, finish_ms: float) -> OffloadSchedule:
        """The schedule, once all tasks have run."""
        copies = sorted(device.copies, key=lambda copy: copy.start_ms)
        spans = [
            Span(copy.block, TRANSFER, copy.start_ms, copy.end_ms - copy.start_ms, copy.direction.value)
            for copy in copies
        ]
        resident = self.sized.resident_bytes
        return OffloadSchedule(
            samples=self.sized.samples,
            budget_bytes=self.budget_bytes,
            finish_ms=finish_ms,
            start_ms={span.name: span.start_ms for span in self._spans},
            compute_ms=self._compute_ms,
            stalls=tuple(self._stalls),
            algorithms=self._algorithms,
            copies=tuple(copies),
            placements=tuple(sorted(device.placements, key=lambda placement: placement.start_ms)),
            defragmentations=tuple(self._defragmentations),
            resident_bytes=resident,
            peak_bytes=resident + device.pool.high_water_bytes,
            live_peak_bytes=resident + device.pool.peak_bytes,
            spans=(*self._spans, *spans),
        )
