"""Places in a file: handed out, given back, and used again."""

from __future__ import annotations

from bisect import insort
from collections import deque


class Extents:
    """Offsets of an address space that grows, by the paper's two-step allocation (moDNN, section 3.3).

    A free place of exactly the size is taken first, then the first one that is large enough, then the end. Places may
    be given back at any moment by any thread, also by a finaliser in the middle of :meth:`take`.

    Attributes:
        end: one past the highest byte that was handed out, since it was last :meth:`trimmed`.
    """

    def __init__(self, alignment: int = 4096) -> None:
        self.end = 0
        self._alignment = alignment
        self._free: list[tuple[int, int]] = []  # offset and size, by offset; neighbours are merged
        self._returned: deque[tuple[int, int]] = deque()

    def rounded(self, nbytes: int) -> int:
        """The size of the place that ``nbytes`` get."""
        return -(-nbytes // self._alignment) * self._alignment

    def take(self, nbytes: int) -> int:
        """Offset of a place for ``nbytes``; raises :attr:`end` where none is free."""
        self._merge()
        wanted = self.rounded(nbytes)
        place = next((index for index, (_, size) in enumerate(self._free) if size == wanted), None)
        if place is None:
            place = next((index for index, (_, size) in enumerate(self._free) if size > wanted), None)
        if place is None:
            offset = self.end
            if self._free and sum(self._free[-1]) == self.end:
                offset, _ = self._free.pop()
            self.end = offset + wanted
            return offset
        offset, size = self._free.pop(place)
        if size > wanted:
            insort(self._free, (offset + wanted, size - wanted))
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """The place may be handed out again."""
        self._returned.append((offset, self.rounded(nbytes)))

    def trimmed(self) -> int:
        """:attr:`end`, once it is no further than the last place that is in use."""
        self._merge()
        if self._free and sum(self._free[-1]) == self.end:
            self.end, _ = self._free.pop()
        return self.end

    def _merge(self) -> None:
        while self._returned:
            insort(self._free, self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for offset, size in self._free:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged
