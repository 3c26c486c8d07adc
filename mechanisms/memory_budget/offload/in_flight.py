"""Copies to the host that still hold the storages they read."""

from __future__ import annotations

import weakref
from collections import deque

from retime.mechanisms.memory_budget.host import HostCopy
from retime.mechanisms.memory_budget.offload.counts import OffloadCounts


class InFlight:
    """Sources of copies are let go of in order, and as late as a limit allows.

    Args:
        limit_bytes: sources hold so much at most.
        counts: how often a copy had to be waited for is added up there.
    """

    def __init__(self, limit_bytes: int, counts: OffloadCounts) -> None:
        self._limit_bytes, self._counts = limit_bytes, counts
        self._copies: deque[tuple[int, weakref.ref[HostCopy]]] = deque()  # bytes; a copy goes with its record
        self._bytes = 0

    def add(self, nbytes: int, copy: HostCopy) -> None:
        """A copy has begun; settle the oldest ones until those in flight keep the limit.

        Raises:
            HostError: a copy failed; it holds its source on.
        """
        self._copies.append((nbytes, weakref.ref(copy)))
        self._bytes += nbytes
        while self._bytes > self._limit_bytes:
            oldest_bytes, reference = self._copies.popleft()
            self._bytes -= oldest_bytes
            oldest = reference()
            if oldest is not None:
                self._counts.stalls += oldest.settle()

    def check(self) -> None:
        """Raise what is known to have failed so far; does not wait.

        Raises:
            HostError: a copy failed.
        """
        for _, reference in self._copies:
            copy = reference()
            if copy is not None:
                copy.check()

    def clear(self) -> None:
        """Forget all of them."""
        self._copies.clear()
