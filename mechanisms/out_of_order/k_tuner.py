"""Finds k while training goes on: every step counts for training, some are timed too (Oh et al. 2022, section 5.1)."""

from collections.abc import Callable

from retime.schedules import KSearch

SETTLING_STEPS = 1
"""Steps after a change of k that are not timed: the first one still waits for gradients sent in the former order."""
TIMED_STEPS = 2
"""Steps timed for each k; the faster one counts, since whatever disturbs a step makes it slower."""
MOST_STEPS = 57
"""Steps that the search may take, with the three that come before it 60."""


class KTuner:
    """Drives the search from the times at which steps begin.

    :param blocks: L.
    :param largest: the largest k allowed.
    :param agree: turns this rank's seconds into the number that all ranks use.
    """

    def __init__(self, blocks: int, largest: int, agree: Callable[[float], float]) -> None:
        self._search = KSearch(blocks, largest=largest, budget=MOST_STEPS // (SETTLING_STEPS + TIMED_STEPS))
        self._agree = agree
        self._began: float | None = None
        self._settling = SETTLING_STEPS
        self._times: list[float] = []

    @property
    def k(self) -> int:
        """The k to use now."""
        next_k = self._search.next_k
        return self._search.best if next_k is None else next_k

    @property
    def is_done(self) -> bool:
        """Whether the search has ended."""
        return self._search.next_k is None

    @property
    def measured(self) -> dict[int, float]:
        """Seconds a step by k, in the order measured."""
        return self._search.measured

    def discard(self) -> None:
        """Do not count the step that is under way: something else took time in it."""
        self._began = None

    def tick(self, now: float) -> bool:
        """A step begins at ``now`` (seconds); returns whether k changes with it.

        All ranks must call this equally often: it ends in a collective when a k has been timed.
        """
        began, self._began = self._began, now
        if self.is_done or began is None:
            return False
        if self._settling:
            self._settling -= 1
            return False
        self._times.append(now - began)
        if len(self._times) < TIMED_STEPS:
            return False
        before = self.k
        self._search.record(self._agree(min(self._times)))
        self._times = []
        self._settling = SETTLING_STEPS
        return self.k != before
