"""The host tiers: pinned memory for training on a CUDA device, a file on a disk for training on a CPU."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
import weakref
from bisect import insort
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor

from retime.foundations.messages import warn_no_effect
from retime.foundations.streams import Mark, SideStream, has_streams
from retime.foundations.torch_private.engine import without_dispatch_modes
from retime.foundations.torch_private.tensors import empty_host_cache
from retime.mechanisms.memory_budget.offload.tier import Finalizers, HostError, HostTier, never_at_once

# The host tier of training on a CUDA device: pinned buffers, filled and read on a side stream.
#
# The compute stream waits for a copy before the memory it read, or filled, is handed to anybody else (``streams``), so
# that the caching allocator can use it again at once.


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
                try:
                    with without_dispatch_modes():
                        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pins)
                except RuntimeError as error:  # the C library, or CUDA, which locks the pages
                    problem = f"{nbytes} more bytes beside {self._live} ({str(error).splitlines()[0]})"
                    raise self._full(problem) from error
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


# Places in a file: handed out, given back, and used again.


class Extents:
    """Offsets of an address space that grows, by the paper's two-step allocation (moDNN, section 3.3).

    A free place of exactly the size is taken first, then the first one that is large enough, then the end. Places may
    be given back at any moment by any thread, also by a finaliser in the middle of :meth:`take`.

    Attributes:
        end: one past the highest byte that was handed out, since it was last :meth:`trimmed`.
    """

    def __init__(self, alignment: int = 4096) -> None:
        self.end = 0
        self._alignment = alignment
        self._free: list[tuple[int, int]] = []  # offset and size, by offset; neighbours are merged
        self._returned: deque[tuple[int, int]] = deque()

    def rounded(self, nbytes: int) -> int:
        """The size of the place that ``nbytes`` get."""
        return -(-nbytes // self._alignment) * self._alignment

    def take(self, nbytes: int) -> int:
        """Offset of a place for ``nbytes``; raises :attr:`end` where none is free."""
        self._merge()
        wanted = self.rounded(nbytes)
        place = next((index for index, (_, size) in enumerate(self._free) if size == wanted), None)
        if place is None:
            place = next((index for index, (_, size) in enumerate(self._free) if size > wanted), None)
        if place is None:
            offset = self.end
            if self._free and sum(self._free[-1]) == self.end:
                offset, _ = self._free.pop()
            self.end = offset + wanted
            return offset
        offset, size = self._free.pop(place)
        if size > wanted:
            insort(self._free, (offset + wanted, size - wanted))
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """The place may be handed out again."""
        self._returned.append((offset, self.rounded(nbytes)))

    def trimmed(self) -> int:
        """:attr:`end`, once it is no further than the last place that is in use."""
        self._merge()
        if self._free and sum(self._free[-1]) == self.end:
            self.end, _ = self._free.pop()
        return self.end

    def _merge(self) -> None:
        while self._returned:
            insort(self._free, self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for offset, size in self._free:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged


# The host tier of training on a CPU: one temporary file, written and read behind the step's back.
#
# The file has no name from its first moment, so it goes with the process whatever happens. Space is reserved on the
# calling thread before a copy starts: a full disk is an error of the forward pass, not of a thread. One thread copies,
# in the order of the calls: a place that is given back while it is read, or written, is written again only afterwards.
#
# The thread holds what it copies. What objects leave behind at their end is seen to by the next call.

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAKE_SPACE = "free some, name another folder, or raise the budget so that less is offloaded"
_CALL_BYTES = 2**30  # Linux moves less than 2 GiB in one call
_GROWTH_BYTES = 16 * 2**20  # the file grows in steps, so that a step asks the file system a few times only
_STACK_BYTES = 512 * 1024


class HostDisk:
    """Storages in a file of ``folder``.

    Args:
        folder: an existing folder on a disk. On a file system that is memory itself a warning says so.
        device: whose storages are taken; host memory is what this tier reads, so only CPU storages are.

    Raises:
        HostError: the folder is missing, or cannot be written to.
        TypeError: ``folder`` is no path.
        ValueError: the device is not the CPU.
    """

    def __init__(self, folder: str | Path, *, device: torch.device | str = "cpu") -> None:
        if not isinstance(folder, str | Path):  # a number would be taken for an open file, and closed
            raise TypeError(f"HostDisk(folder={folder!r}): name a folder, as text or as a Path")
        if torch.device(device).type != "cpu":
            raise ValueError(f"host='disk:{folder}' takes storages of the CPU, not of {device}: use host='memory'")
        self.name = f"disk:{folder}"
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open as long as the tier
        except OSError as error:
            raise HostError(
                error.errno, f"host={self.name!r} cannot be written to ({error.strerror}): name an existing folder"
            ) from error
        weakref.finalize(self, self._file.close)  # for those who forget to
        if _is_memory(Path(folder)):
            warn_no_effect(
                f"host={self.name!r} is a file system in memory: offloading there frees nothing; name a disk's folder"
            )
        self._extents = Extents()
        self._left = Finalizers()
        self._lock = threading.RLock()
        self._reserved = 0
        self._live = 0
        self._closed = False
        # The thread runs already: where memory is short, one that starts later may never come up.
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="retime-host-disk", initializer=never_at_once)
            self._pool.submit(threading.get_ident).result()
        finally:
            threading.stack_size(before)

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def reserve(self, nbytes: int, storages: int) -> None:
        with self._lock:
            self._check_open()
            nbytes += storages * self._extents.rounded(1)
            self._left.see_to()
            least = max(nbytes, self._extents.trimmed())
            if least < self._reserved:
                os.ftruncate(self._file.fileno(), least)
                self._reserved = least
            self._reserve(nbytes)

    def store(self, source: torch.UntypedStorage) -> _DiskCopy:
        nbytes = source.nbytes()
        with self._lock:
            self._check_open()
            self._left.see_to()
            place = _Place(self._extents.take(nbytes), nbytes)
            try:
                self._reserve(self._extents.end)
            except HostError:
                self._extents.give_back(place.offset, nbytes)
                raise
            self._live += nbytes
            written = self._pool.submit(_write, self._file.fileno(), [source], place)
            copy = _DiskCopy(self, source, place, written)
            self._left.when_gone(copy, partial(self._give_back, place))
            return copy

    def live_bytes(self) -> int:
        with self._lock:
            self._left.see_to()
            return self._live

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True)
        self._file.close()

    def __enter__(self) -> HostDisk:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise HostError(errno.EBADF, f"host={self.name!r} was closed: make a new one")

    def _reserve(self, nbytes: int) -> None:
        """Make the file at least that long, with blocks behind it."""
        if nbytes <= self._reserved:
            return
        wanted = max(nbytes, self._reserved + _GROWTH_BYTES) if self._reserved else nbytes
        for size in dict.fromkeys((wanted, nbytes)):  # near the end of the disk only what is needed
            try:
                os.posix_fallocate(self._file.fileno(), self._reserved, size - self._reserved)
            except OSError as error:
                failure = error
            else:
                self._reserved = size
                return
        free = "free space unknown"
        with suppress(OSError):
            space = os.fstatvfs(self._file.fileno())
            free = f"{space.f_bavail * space.f_frsize} bytes free"  # quotas and limits of a process may be tighter
        raise HostError(
            failure.errno,
            f"host={self.name!r} has no space for {nbytes - self._reserved} more bytes beside {self._reserved} "
            f"({failure.strerror}; {free}): {_MAKE_SPACE}",
        ) from failure

    def _give_back(self, place: _Place) -> None:
        with self._lock:
            if place.taken:
                place.taken = False
                self._extents.give_back(place.offset, place.nbytes)
                self._live -= place.nbytes


@dataclass(eq=False, slots=True)
class _Place:
    """Place of a storage in the file."""

    offset: int
    nbytes: int
    taken: bool = True


class _DiskCopy:
    """Holds the source until :meth:`settle`: should the copy fail, nothing is lost."""

    def __init__(self, host: HostDisk, source: torch.UntypedStorage, place: _Place, written: Future[None]) -> None:
        self.nbytes = place.nbytes
        self._host = host
        self._source: torch.UntypedStorage | None = source
        self._place = place
        self._written = written

    def settle(self) -> bool:
        waited = not self._written.done()
        failure = self._written.exception()
        if failure is not None:
            raise self._error("written to", failure) from failure
        self._source = None
        return waited

    def check(self) -> None:
        if self._written.done():
            failure = self._written.exception()
            if failure is not None:
                raise self._error("written to", failure) from failure

    def load(self, into: torch.UntypedStorage) -> _DiskLoading:
        descriptor = self._host._file.fileno()
        return _DiskLoading(self, self._host._pool.submit(_read, descriptor, [into], self._place, self._written))

    def free(self) -> None:
        self._source = None
        self._host._give_back(self._place)

    def _error(self, what: str, failure: BaseException) -> HostError:
        number = failure.errno if isinstance(failure, OSError) and failure.errno else errno.EIO
        text = f"host={self._host.name!r} could not be {what}: {failure}"
        return HostError(number, f"{text}. {_MAKE_SPACE.capitalize()}" if number in _FULL else text)


class _DiskLoading:
    """Holds the copy, whose place would be written into again."""

    def __init__(self, copy: _DiskCopy, read: Future[None]) -> None:
        self._copy = copy
        self._read = read

    def wait(self) -> bool:
        waited = not self._read.done()
        failure = self._read.exception()
        if failure is not None:
            error = self._copy._error("read", failure)
            raise HostError(error.errno, f"{error.strerror}; gradients may be incomplete: zero them") from failure
        return waited


def _memory_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


# What is copied is held by a list and let go of before the copy counts as done: memory is freed when others expect it.


def _write(descriptor: int, source: list[torch.UntypedStorage], place: _Place) -> None:
    try:
        view, done = _memory_of(source[0]), 0
        while done < place.nbytes:
            written = os.pwrite(descriptor, view[done : done + _CALL_BYTES], place.offset + done)
            if written == 0:
                raise OSError(errno.EIO, f"the disk took none of the last {place.nbytes - done} bytes")
            done += written
    finally:
        source.clear()


def _read(descriptor: int, into: list[torch.UntypedStorage], place: _Place, written: Future[None]) -> None:
    try:
        written.result()
        view, done = _memory_of(into[0]), 0
        while done < place.nbytes:
            read = os.preadv(descriptor, [view[done : done + _CALL_BYTES]], place.offset + done)
            if read == 0:
                raise OSError(errno.EIO, f"the file ends {place.nbytes - done} bytes early")
            done += read
    finally:
        into.clear()


def _is_memory(folder: Path) -> bool:
    """Check whether the folder lies on tmpfs or ramfs."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    folder = folder.resolve()
    under = [(len(Path(where).parts), kind) for _, where, kind, *_ in mounts if folder.is_relative_to(where)]
    # Of several mounts on one folder the last one counts.
    return bool(under) and max(reversed(under), key=lambda mount: mount[0])[1] in ("tmpfs", "ramfs")


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
