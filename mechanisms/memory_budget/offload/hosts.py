"""The host tier of training on a CUDA device: pinned buffers, filled and read on a side stream.

The compute stream waits for a copy before the memory it read, or filled, is handed to anybody else (``streams``), so
that the caching allocator can use it again at once.
"""

from __future__ import annotations

import errno
import tempfile
import threading
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import Tensor

from retime.foundations.streams import Mark, SideStream, has_streams
from retime.foundations.torch_private.engine import without_dispatch_modes
from retime.foundations.torch_private.tensors import empty_host_cache
from retime.mechanisms.memory_budget.offload.disk import HostDisk
from retime.mechanisms.memory_budget.offload.tier import Finalizers, HostError, HostTier


class HostMemory:
    """Storages of ``device`` in CPU memory, page-locked where the device is a CUDA device.

    Buffers are kept by size and used again. All of them together are no more than what was reserved last, or was
    held at once since then: batches of ever new shapes ask for ever new sizes, so those that were used longest ago go.
    :meth:`close` gives back the rest.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pins = has_streams(self._device)
        index: int | None = self._device.index
        if self._device.type == "cuda" and index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._side = SideStream(self._device)
        self._cached = _CachedBuffers()
        self._left = Finalizers()
        self._lock = threading.RLock()
        self._live = 0
        self._most = 0

    def takes(self, device: torch.device) -> bool:
        return device.type == self._device.type and (not self._pins or device.index == self._device.index)

    def reserve(self, nbytes: int, storages: int) -> None:
        with self._lock:
            self._left.see_to()
            available = psutil.virtual_memory().available
            if nbytes > available + self._live:
                self._release_cached()  # they may be of other sizes than those to come
                available = psutil.virtual_memory().available
            if nbytes > available + self._live:
                raise self._full(f"{nbytes} bytes at once: {available} bytes of CPU memory are free")
            self._most = max(nbytes, self._live)  # what was live before, to measure, tells nothing about steps
            self._cached.shrink(self._most - self._live)

    def store(self, source: torch.UntypedStorage) -> _MemoryCopy:
        nbytes = source.nbytes()
        with self._lock:
            self._left.see_to()
            buffer = self._cached.take(nbytes)
            if buffer is None:
                self._cached.shrink(self._most - self._live - nbytes)
                buffer = self._new(nbytes)
            self._live += nbytes
            self._most = max(self._most, self._live)
            with without_dispatch_modes():  # a storage may end in the middle of anything
                copy = _MemoryCopy(self, source, buffer)
            self._left.when_gone(copy, partial(self._release, copy.copied))
            return copy

    def live_bytes(self) -> int:
        with self._lock:
            self._left.see_to()
            return self._live

    def close(self) -> None:
        with self._lock:
            self._left.see_to()
            self._release_cached()

    def _new(self, nbytes: int) -> Tensor:
        try:
            with without_dispatch_modes():
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pins)
        except RuntimeError as error:  # the C library, or CUDA, which locks the pages
            raise self._full(f"{nbytes} more bytes beside {self._live} ({str(error).splitlines()[0]})") from error

    def _release(self, copied: _Copied) -> None:
        """The next copy into the buffer runs on the same stream as all that still read it, so it may go at once."""
        with self._lock:
            copied.mark.wait()
            buffer, copied.buffer = copied.buffer, None
            if buffer is not None:
                self._live -= buffer.nbytes
                self._cached.put(buffer)

    def _release_cached(self) -> None:
        self._cached.shrink(0)
        if self._pins:
            self._side.synchronize()
            empty_host_cache()  # torch keeps locked pages too

    @staticmethod
    def _full(what: str) -> HostError:
        return HostError(
            errno.ENOMEM,
            f"host='memory' has no space for {what}. Free some, or raise the budget so that less is offloaded",
        )


@dataclass(eq=False, slots=True)
class _Copied:
    """A copy that was given: its mark holds the storage, whose memory must not go to anybody else before the end."""

    mark: Mark
    buffer: Tensor | None = None


class _MemoryCopy:
    def __init__(self, host: HostMemory, source: torch.UntypedStorage, buffer: Tensor) -> None:
        self.nbytes = source.nbytes()
        self.copied = _Copied(host._side.copy(buffer, _bytes_of(source), hold=[source]), buffer)
        self._host = host

    def settle(self) -> bool:
        return self.copied.mark.wait()

    def check(self) -> None:
        pass

    def load(self, into: torch.UntypedStorage) -> _MemoryLoading:
        assert self.copied.buffer is not None, "the copy was freed"
        host = self._host
        back = _Copied(host._side.copy(_bytes_of(into), self.copied.buffer, hold=[into]))
        loading = _MemoryLoading(back)
        with host._lock:
            host._left.see_to()
            host._left.when_gone(loading, partial(host._release, back))
        return loading

    def free(self) -> None:
        self._host._release(self.copied)


class _MemoryLoading:
    def __init__(self, back: _Copied) -> None:
        self._back = back

    def wait(self) -> bool:
        return self._back.mark.wait()


class _CachedBuffers:
    """Buffers that nobody uses, by size."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._of: dict[int, list[Tensor]] = {}  # the size that was used longest ago first

    def put(self, buffer: Tensor) -> None:
        self._of.setdefault(buffer.nbytes, []).append(buffer)
        self.nbytes += buffer.nbytes

    def take(self, nbytes: int) -> Tensor | None:
        """One of exactly that size, if there is one."""
        same = self._of.pop(nbytes, [])
        if not same:
            return None
        buffer = same.pop()
        if same:
            self._of[nbytes] = same
        self.nbytes -= nbytes
        return buffer

    def shrink(self, nbytes: int) -> None:
        """Drop buffers until no more than so many bytes are left."""
        while self._of and self.nbytes > nbytes:
            size, same = next(iter(self._of.items()))
            same.pop()
            self.nbytes -= size
            if not same:
                del self._of[size]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as a flat tensor ``(nbytes,)`` of uint8 that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# The host tier that a text names.


def check_host_text(text: str | None) -> None:
    """Refuse what names no tier for any device, before the device is known.

    Raises:
        TypeError: no text, and not None.
        ValueError: it names no tier.
    """
    if not isinstance(text, str | None):
        raise TypeError(f"host={text!r} must be a text: use 'memory' or 'disk:FOLDER'")
    if text not in (None, "memory") and not (text.startswith("disk:") and text != "disk:"):
        raise ValueError(f"host={text!r} names no place for offloaded tensors: use 'memory' or 'disk:FOLDER'")


def parse_host(text: str | None, device: torch.device | str) -> HostTier:
    """The host tier that ``host=text`` means for training on ``device``.

    Args:
        text: ``"memory"``: CPU memory, for CUDA devices. ``"disk:FOLDER"``: a file there, for training on the CPU.
            None: memory for CUDA, the folder for temporary files otherwise.
        device: where the step computes.

    Raises:
        TypeError: no text, and not None.
        ValueError: the text names no tier, or one that is no use for the device.
        HostError: the folder is missing, or cannot be written to.
    """
    check_host_text(text)
    device = torch.device(device)
    in_host_memory = device.type == "cpu" and not has_streams(device)
    if text is None:
        text = f"disk:{tempfile.gettempdir()}" if in_host_memory else "memory"
    if text != "memory":
        return HostDisk(text.removeprefix("disk:"), device=device)
    if in_host_memory:
        raise ValueError("host='memory' frees nothing when the model trains on the CPU: use host='disk:FOLDER'")
    return HostMemory(device)
