"""What objects leave to be done when they have ended, done at the next occasion.

A finaliser of Python's would do it at once, but an exception that a signal handler raises in one, Ctrl-C's say, is
printed and lost; and it may run in the middle of anything, on any thread. Here only a queue is appended to, in C.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

__all__ = ["LeftBehind"]


class _Will(weakref.ref[object]):
    __slots__ = ("then",)
    then: Callable[[], object]


class LeftBehind:
    """Things to do when objects have ended."""

    def __init__(self) -> None:
        self._wills: dict[int, _Will] = {}
        self._due: deque[weakref.ref[object]] = deque()

    def when_gone(self, owner: object, then: Callable[[], object]) -> None:
        """Do this at the first :meth:`see_to` after ``owner``'s end; ``then`` must not hold it."""
        will = _Will(owner, self._due.append)
        will.then = then
        self._wills[id(will)] = will

    def see_to(self) -> None:
        """Do what is due. One that is interrupted is done again: twice must be as good as once."""
        while self._due:
            will = self._due[0]
            if id(will) in self._wills:
                self._wills[id(will)].then()
                del self._wills[id(will)]
            self._due.popleft()
