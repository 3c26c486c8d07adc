"""The host tier of training on a CUDA device: pinned buffers, filled and read on a side stream.

The order of events stands in for ``record_stream``: the compute stream waits for a copy before the memory it read, or
filled, is handed to anybody else, so that the caching allocator can use it again at once and the peak is the same in
every step. The host itself never waits.
"""

from __future__ import annotations

import errno
from collections import defaultdict

import psutil
import torch
from torch import Tensor

from retime.mechanisms.memory.host import HostError


class HostMemory:
    """Storages of ``device`` in CPU memory, page-locked where the device is a CUDA device.

    Buffers are kept by size and used again; :meth:`close` gives them back.
    """

    name = "memory"

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._pool: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._held = 0

    def takes(self, device: torch.device) -> bool:
        return device.type == self._device.type and (not self._cuda or device.index == self._stream_device())

    def reserve(self, nbytes: int, storages: int) -> None:
        pooled = sum(size * len(buffers) for size, buffers in self._pool.items())
        available = psutil.virtual_memory().available
        if nbytes > available + pooled + self._held:
            raise self._full(f"{nbytes} bytes at once: {available} bytes of CPU memory are free")

    def store(self, source: torch.UntypedStorage) -> _MemoryCopy:
        nbytes = source.nbytes()
        free = self._pool[nbytes]
        try:
            buffer = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        except RuntimeError as error:  # the C library, or CUDA, which locks the pages
            raise self._full(f"{nbytes} more bytes beside {self._held} ({str(error).splitlines()[0]})") from error
        self._held += nbytes
        return _MemoryCopy(self, source, buffer)

    def bytes_held(self) -> int:
        return self._held

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._pool.clear()

    @staticmethod
    def _full(what: str) -> HostError:
        return HostError(
            errno.ENOMEM,
            f"host='memory' has no space for {what}. Free some, or raise the budget so that less is offloaded",
        )

    def _stream_device(self) -> int | None:
        return self._stream.device.index if self._stream is not None else None

    def _copy(self, into: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """``into <- source`` after all that the compute stream was given so far."""
        if self._stream is None:
            into.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def _await(self, event: torch.cuda.Event | None) -> bool:
        if event is None or event.query():  # type: ignore[no-untyped-call]
            return False
        torch.cuda.current_stream(self._device).wait_event(event)
        return True


class _MemoryCopy:
    def __init__(self, host: HostMemory, source: torch.UntypedStorage, buffer: Tensor) -> None:
        self.nbytes = source.nbytes()
        self._host = host
        self._source: torch.UntypedStorage | None = source
        self._buffer: Tensor | None = buffer
        self._event = host._copy(buffer, _bytes_of(source))

    def settle(self) -> bool:
        waited = self._host._await(self._event)
        self._source = None
        return waited

    def check(self) -> None:
        pass

    def load(self, into: torch.UntypedStorage) -> _MemoryLoading:
        assert self._buffer is not None, "the copy was freed"
        return _MemoryLoading(self._host, into, self._host._copy(_bytes_of(into), self._buffer))

    def free(self) -> None:
        if self._buffer is None:
            return
        self._host._await(self._event)
        self._source = None
        # The next copy into it runs on the same stream as all that still read it.
        self._host._pool[self.nbytes].append(self._buffer)
        self._host._held -= self.nbytes
        self._buffer = None

    def __del__(self) -> None:
        self.free()


class _MemoryLoading:
    def __init__(self, host: HostMemory, into: torch.UntypedStorage, event: torch.cuda.Event | None) -> None:
        self._host = host
        self._into = into
        self._event = event

    def wait(self) -> bool:
        return self._host._await(self._event)

    def __del__(self) -> None:
        self._host._await(self._event)  # before the target's memory can go to somebody else


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as a flat tensor ``(nbytes,)`` of uint8 that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
