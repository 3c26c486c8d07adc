"""A host tier that counts bytes and keeps no data: for replays of a step with fake tensors."""

from __future__ import annotations

from functools import partial

import torch

from retime.mechanisms.memory_budget.host.left_behind import LeftBehind


class HostNull:
    """Takes storages of any device and gives back whatever the memory holds."""

    name = "null"

    def __init__(self) -> None:
        self._left = LeftBehind()
        self._copies: set[int] = set()
        self._live = 0

    def takes(self, device: torch.device) -> bool:
        return True

    def reserve(self, nbytes: int, storages: int) -> None:
        """There is always space."""

    def store(self, source: torch.UntypedStorage) -> _NullCopy:
        self._left.see_to()
        copy = _NullCopy(self, source)
        self._live += copy.nbytes
        self._copies.add(id(copy))
        self._left.when_gone(copy, partial(self._release, id(copy), copy.nbytes))
        return copy

    def live_bytes(self) -> int:
        self._left.see_to()
        return self._live

    def _release(self, copy: int, nbytes: int) -> None:
        if copy in self._copies:
            self._copies.remove(copy)
            self._live -= nbytes

    def close(self) -> None:
        pass


class _NullCopy:
    def __init__(self, host: HostNull, source: torch.UntypedStorage) -> None:
        self.nbytes = source.nbytes()
        self._host = host
        self._source: torch.UntypedStorage | None = source  # as a real copy does until it has ended

    def settle(self) -> bool:
        self._source = None
        return False

    def check(self) -> None:
        pass

    def load(self, into: torch.UntypedStorage) -> _NullLoading:
        return _NullLoading()

    def free(self) -> None:
        self._source = None
        self._host._release(id(self), self.nbytes)


class _NullLoading:
    def wait(self) -> bool:
        return False
