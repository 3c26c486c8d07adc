"""Finds k while training goes on: every step counts for training, some are timed too (Oh et al. 2022, section 5.1)."""

import statistics
from collections.abc import Callable

from retime.schedules import KSearch

SETTLING_STEPS = 1
"""Steps after a change of k that are not timed: the first one still waits for gradients sent in the former order."""
TIMED_STEPS = 2
"""Steps timed together for each k. Their mean counts and not the fastest: a step can lend time to the next one."""
MOST_STEPS = 57
"""Steps that the search may take, with the three that come before it 60."""
FINALISTS = 3
REPEATS = 2
"""As far as steps are left, the best few are timed again, so often each."""

TIE = 0.01
"""By how much slower than the best a smaller k may be and still be chosen: it needs less memory."""


class KTuner:
    """Drives the search from the times at which steps begin.

    Args:
        blocks: L.
        largest: the largest k allowed.
        agree: turns this rank's seconds into the number that all ranks use.
    """

    def __init__(self, blocks: int, largest: int, agree: Callable[[float], float]) -> None:
        self._visits = MOST_STEPS // (SETTLING_STEPS + TIMED_STEPS)
        self._search = KSearch(blocks, largest=largest, budget=self._visits)
        self._agree = agree
        self._times: dict[int, list[float]] = {}
        self._again: list[int] | None = None
        self._began: float | None = None
        self._settling = SETTLING_STEPS
        self._timed: list[float] = []

    @property
    def k(self) -> int:
        """The k to use now."""
        if self._search.next_k is not None:
            return self._search.next_k
        if self._again:
            return self._again[0]
        means = self.measured
        good_enough = (1 + TIE) * min(means.values(), default=0.0)
        return min((k for k, seconds in means.items() if seconds <= good_enough), default=0)

    @property
    def is_done(self) -> bool:
        """Whether the search has ended."""
        return self._search.next_k is None and not self._again

    @property
    def measured(self) -> dict[int, float]:
        """Seconds a step by k, in the order in which they were first measured."""
        return {k: statistics.fmean(times) for k, times in self._times.items()}

    def discard(self) -> None:
        """Do not count the step that is under way: something else took time in it."""
        self._began = None

    def tick(self, now: float) -> bool:
        """A step begins; all ranks must call this equally often: it ends in a collective when a k has been timed.

        Args:
            now: seconds.

        Returns:
            Whether k changes with it.
        """
        began, self._began = self._began, now
        if self.is_done or began is None:
            return False
        if self._settling:
            self._settling -= 1
            return False
        self._timed.append(now - began)
        if len(self._timed) < TIMED_STEPS:
            return False
        before = self.k
        self._note(before, self._agree(statistics.fmean(self._timed)))
        self._timed, self._settling = [], SETTLING_STEPS
        return self.k != before

    def _note(self, k: int, seconds: float) -> None:
        self._times.setdefault(k, []).append(seconds)
        if self._search.next_k is not None:
            self._search.record(seconds)
        elif self._again:
            del self._again[0]
        if self._search.next_k is None and self._again is None:
            left = min(self._visits - len(self._search.measured), REPEATS * FINALISTS)
            best = sorted(self._search.measured, key=self._search.measured.__getitem__)[:FINALISTS]
            self._again = [best[i % len(best)] for i in range(left - left % len(best))]
