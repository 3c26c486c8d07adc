"""A host tier that counts bytes and keeps no data: for replays of a step with fake tensors."""

from __future__ import annotations

import torch


class HostNull:
    """Takes storages of any device and gives back whatever the memory holds."""

    name = "null"

    def __init__(self) -> None:
        self._held = 0

    def takes(self, device: torch.device) -> bool:
        return True

    def reserve(self, nbytes: int, storages: int) -> None:
        """There is always space."""

    def store(self, source: torch.UntypedStorage) -> _NullCopy:
        copy = _NullCopy(self, source)
        self._held += copy.nbytes
        return copy

    def bytes_held(self) -> int:
        return self._held

    def close(self) -> None:
        pass


class _NullCopy:
    def __init__(self, host: HostNull, source: torch.UntypedStorage) -> None:
        self.nbytes = source.nbytes()
        self._host = host
        self._source: torch.UntypedStorage | None = source  # as a real copy does until it has ended
        self._freed = False

    def settle(self) -> bool:
        self._source = None
        return False

    def check(self) -> None:
        pass

    def load(self, into: torch.UntypedStorage) -> _NullLoading:
        return _NullLoading()

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._source = None
            self._host._held -= self.nbytes


class _NullLoading:
    def wait(self) -> bool:
        return False
