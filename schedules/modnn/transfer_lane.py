"""The transfer stream on paper: what is copied when (the paper's Strm_D, section 5.2)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


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
        """When the last copy so far ends."""
        return self._ends[-1] if self._ends else 0.0

    def place(self, requests: Iterable[tuple[float, float]]) -> list[float]:
        """When copies would start, in milliseconds; nothing is booked.

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
