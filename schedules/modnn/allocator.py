"""The device's memory as a linked list of segments, with offsets (moDNN, section 3.3).

Nothing is allocated here: a planner allocates and frees on paper, and the offsets that come out hold for the run.
"""

from __future__ import annotations

from bisect import bisect_left
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
