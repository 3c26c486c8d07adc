"""The search for the k of reverse-first-k (Oh et al. 2022, section 5.1): coarse steps, then ever finer ones."""

from __future__ import annotations

import math

from retime.schedules.errors import check_count

_FIRST_PASS = 10
"""The first pass goes up in tenths of the layers."""


class KSearch:
    """Finds the k with the least step time from few measurements; the caller measures.

    The first pass goes from 0 to below L in steps of L / 10, rounded up so that it never has more than ten stops. Then
    the step is halved again and again, each time searching the open range of one former step on either side of the best
    k so far, until the step would fall below 1. No k is measured twice. If the step time falls up to some k and rises
    after it, which the paper takes for granted, the answer is the best of all k.

    The search is a function of the recorded times alone: ranks that record the same numbers measure the same k, and
    recording ``measured.values()`` again, in order, resumes it.

    >>> search = KSearch(8)
    >>> while (k := search.next_k) is not None:
    ...     search.record(seconds=1.0 + abs(k - 5))
    >>> search.best
    5

    Args:
        layers: L, at least 1; k stays below it.
        largest: the largest k allowed, such as a memory bound gives; the tenths are then taken of what it leaves.
        budget: the most k to measure, at least 1; the search then ends with the best so far. ``None`` for no limit.

    Attributes:
        measured: seconds by k, in the order measured.

    Raises:
        ValueError: when an argument is out of its range.
    """

    measured: dict[int, float]

    def __init__(self, layers: int, *, largest: int | None = None, budget: int | None = None) -> None:
        check_count(layers=layers)
        if largest is not None:
            check_count(0, ", where 0 defers nothing", largest=largest)
        if budget is not None:
            check_count(1, ", or None for no limit", budget=budget)
        self.measured = {}
        self._budget = budget
        self._last = layers - 1 if largest is None else min(largest, layers - 1)
        self._step = math.ceil((self._last + 1) / _FIRST_PASS)
        self._ahead = list(range(0, self._last + 1, self._step))

    @property
    def next_k(self) -> int | None:
        """The k to measure now; None when the search has ended."""
        spent = self._budget is not None and len(self.measured) >= self._budget
        return None if spent or not self._ahead else self._ahead[0]

    def record(self, seconds: float) -> None:
        """Take note of the step time measured at :attr:`next_k`.

        Args:
            seconds: of one training step, 0 or more.

        Raises:
            ValueError: when ``seconds`` is negative or no finite number.
            RuntimeError: when the search has ended.
        """
        k = self.next_k
        if k is None:
            raise RuntimeError(f"the search for k has ended with k={self.best}: record only while next_k is not None")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds={seconds} at k={k}: give the measured time of a step, a finite number")
        self.measured[k] = seconds
        del self._ahead[0]
        while not self._ahead and self._step > 1:
            self._refine()

    @property
    def best(self) -> int:
        """The k with the least time so far, the smaller of equals; 0 before anything was measured."""
        return min(self.measured, key=lambda k: (self.measured[k], k), default=0)

    def _refine(self) -> None:
        """Halve the step and look at what lies less than one former step from the best."""
        reach, self._step = self._step - 1, self._step // 2
        stops = reach // self._step
        around = (self.best + stop * self._step for stop in range(-stops, stops + 1))
        self._ahead = [k for k in around if 0 <= k <= self._last and k not in self.measured]
