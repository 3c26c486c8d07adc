"""An end to planning that takes too long; what is known by then stands."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OutOfTime", "TimeLimit"]


class OutOfTime(BaseException):
    """Planning takes too long; no error, so that nobody takes it for the step's."""


class TimeLimit:
    """So many seconds from now, for what runs in :meth:`stoppable`.

    In the main thread of a system with alarms it is stopped in the middle, elsewhere at the next :meth:`check`.

    Args:
        seconds: None for no end.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stoppable = False

    @property
    def over(self) -> bool:
        """Nothing more is to be begun."""
        return time.monotonic() >= self._end

    def check(self) -> None:
        """Between two things that take long.

        Raises:
            OutOfTime: the time is over.
        """
        if self.over:
            raise OutOfTime

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Around what may be given up.

        Raises:
            OutOfTime: the time is over.
        """
        self.check()
        before, self._stoppable = self._stoppable, True
        try:
            yield
        finally:
            self._stoppable = before

    @contextmanager
    def alarmed(self) -> Iterator[None]:
        """Around everything that is to end in time, where the system has alarms."""
        main = threading.current_thread() is threading.main_thread()
        if math.isinf(self._end) or not main or not hasattr(signal, "setitimer"):
            yield
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, self._end - time.monotonic()))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _ring(self, *_: object) -> None:
        self._end = min(self._end, time.monotonic())  # two clocks: nothing is to be begun after the alarm
        if self._stoppable:
            raise OutOfTime
