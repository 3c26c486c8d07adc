"""What a device hands out, on paper: memory as a linked list of segments, and the time of its transfer stream.

Nothing is allocated or copied here: a planner does so on paper, and the offsets (moDNN, section 3.3) and times (the
paper's Strm_D, section 5.2) that come out hold for the run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from retime.schedules.errors import ScheduleError


@dataclass(eq=False, slots=True)
class Segment:
    """A contiguous piece of the pool: occupied by its owner, or free."""

    offset: int
    size: int
    owner: int | None = None
    """The number of the block that occupies it; ``None`` when free."""
    before: Segment | None = None
    after: Segment | None = None

    @property
    def end(self) -> int:
        return self.offset + self.size


class Pool:
    """A memory of so many bytes, in a doubly linked list of segments.

    A request takes the first free segment of exactly its size, which leaves no hole, else the first that is large
    enough; freeing merges a segment with free neighbours.

    Args:
        capacity: bytes.

    Raises:
        ScheduleError: the capacity is negative.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ScheduleError(f"a pool of {capacity} bytes: give 0 or more")
        self.capacity = capacity
        self.high_water_bytes = 0
        """The highest address ever occupied: what the pool really needs, with its holes."""
        self.peak_bytes = 0
        """The most bytes ever occupied at once, without holes."""
        self.steps = 0
        """Segments looked at so far: the cost of the bookkeeping, for tests."""
        self.clear()

    def clear(self) -> None:
        """Free everything; the marks stay."""
        self.used_bytes = 0
        self._first = Segment(0, self.capacity)
        # Searches go over the free segments only: there are few, while a large pool holds hundreds of blocks.
        self._free = [self._first] if self.capacity else []

    def find(self, size: int) -> Segment | None:
        """The free segment that a request of ``size`` bytes would take."""
        first_fit = None
        for segment in self._free:
            self.steps += 1
            if segment.size == size:
                return segment
            if first_fit is None and segment.size > size:
                first_fit = segment
        return first_fit

    def allocate(self, size: int, owner: int) -> Segment | None:
        """Occupy ``size`` bytes, or return ``None`` when no free segment is large enough.

        Raises:
            ScheduleError: the size is not positive.
        """
        if size <= 0:
            raise ScheduleError(f"cannot allocate {size} bytes: give 1 or more")
        segment = self.find(size)
        if segment is None:
            return None
        place = bisect_left(self._free, segment.offset, key=_offset)
        if segment.size > size:
            rest = Segment(segment.offset + size, segment.size - size, None, segment, segment.after)
            if segment.after:
                segment.after.before = rest
            segment.after, segment.size = rest, size
            self._free[place] = rest
        else:
            del self._free[place]
        segment.owner = owner
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.high_water_bytes = max(self.high_water_bytes, segment.end)
        return segment

    def free(self, segment: Segment) -> None:
        """Free an occupied segment; it merges with the free neighbours, so do not use it afterwards.

        Raises:
            ScheduleError: the segment is free already.
        """
        if segment.owner is None:
            raise ScheduleError(f"the segment at {segment.offset} is free already")
        self.used_bytes -= segment.size
        segment.owner = None
        place = bisect_left(self._free, segment.offset, key=_offset)
        following = segment.after
        if following and following.owner is None:
            self._join(segment, following)
            self._free[place] = segment
        else:
            self._free.insert(place, segment)
        if segment.before and segment.before.owner is None:
            self._join(segment.before, segment)
            del self._free[place]

    def segments(self) -> Iterator[Segment]:
        """All segments, by address."""
        segment: Segment | None = self._first if self.capacity else None
        while segment:
            yield segment
            segment = segment.after

    def would_fit(self, sizes: Iterable[int]) -> list[bool]:
        """For each of these requests, made one after another: would it find a place?"""
        free = [segment.size for segment in self._free]
        answers = []
        for size in sizes:
            fits = [place for place, room in enumerate(free) if room >= size]
            if fits:
                free[next((place for place in fits if free[place] == size), fits[0])] -= size
            answers.append(bool(fits))
        return answers

    @staticmethod
    def _join(left: Segment, right: Segment) -> None:
        left.size += right.size
        left.after = right.after
        if right.after:
            right.after.before = left


def offload_runs(segments: Sequence[Segment], size: int, movable: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """The offloading schemes for a request: runs of neighbours that are free or may leave (section 5.2.1, Figure 6).

    Each segment in turn is taken as a run's first, and followed to higher addresses until ``size`` bytes are reached;
    a block that may not leave ends the run.

    Args:
        segments: by address, as :meth:`Pool.segments` gives them.
        size: bytes wanted.
        movable: of a block's number: may it leave?

    Yields:
        ``(first, stop)``: the run is ``segments[first:stop]``, the shortest from its first segment.
    """
    first, total = 0, 0
    for stop, segment in enumerate(segments, 1):
        if segment.owner is not None and not movable(segment.owner):
            first, total = stop, 0
            continue
        total += segment.size
        while total >= size and first < stop:
            yield first, stop
            total -= segments[first].size
            first += 1


def _offset(segment: Segment) -> int:
    return segment.offset


class TransferLane:
    """One resource that copies one block at a time, with the gaps between copies kept.

    The schedule is made before the run, so a copy that turns out to be needed later may still be put into an earlier
    gap: that is how task ``s`` finds the output of ``t`` already offloaded "immediately after ``t``" (Figure 3b).
    """

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self.steps = 0
        """Busy stretches looked at so far, for tests."""

    @property
    def free_ms(self) -> float:
        """Time at which the last copy so far ends."""
        return self._ends[-1] if self._ends else 0.0

    def place(self, requests: Iterable[tuple[float, float]]) -> list[float]:
        """Times at which copies would start, in milliseconds; nothing is booked.

        Args:
            requests: for each copy, in order, the earliest start and the duration.
        """
        placed: list[tuple[float, float]] = []
        for ready_ms, copy_ms in requests:
            start_ms = self._earliest(ready_ms, copy_ms)
            while clash := next((end for begin, end in placed if begin < start_ms + copy_ms and start_ms < end), None):
                start_ms = self._earliest(clash, copy_ms)
            placed.append((start_ms, start_ms + copy_ms))
        return [start_ms for start_ms, _ in placed]

    def book(self, ready_ms: float, copy_ms: float) -> float:
        """Put a copy into the first gap that holds it from ``ready_ms`` on; returns its start."""
        start_ms = self._earliest(ready_ms, copy_ms)
        if copy_ms <= 0:
            return start_ms
        end_ms = start_ms + copy_ms
        left = bisect_left(self._ends, start_ms)
        right = bisect_right(self._starts, end_ms)
        # Stretches that touch become one, so that a busy stream stays a short list.
        merged_start = min(start_ms, self._starts[left]) if left < right else start_ms
        merged_end = max(end_ms, self._ends[right - 1]) if left < right else end_ms
        self._starts[left:right] = [merged_start]
        self._ends[left:right] = [merged_end]
        return start_ms

    def _earliest(self, ready_ms: float, copy_ms: float) -> float:
        place = bisect_right(self._ends, ready_ms)
        start_ms = ready_ms
        while place < len(self._starts) and self._starts[place] < start_ms + copy_ms:
            start_ms = max(start_ms, self._ends[place])
            place += 1
            self.steps += 1
        return start_ms
