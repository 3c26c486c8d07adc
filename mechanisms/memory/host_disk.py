"""The host tier of training on a CPU: one temporary file, written and read behind the step's back.

The file has no name from its first moment, so it goes with the process whatever happens. Space is reserved on the
calling thread before a copy starts: a full disk is an error of the forward pass, not of a thread. One thread copies, in
the order of the calls: a place that is given back while it is read, or written, is written again only afterwards.

Whatever may run in a finaliser does not wait: garbage is collected on any thread, also on the one that copies.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from retime.mechanisms.memory.host import HostError
from retime.mechanisms.memory.host_extents import Extents
from retime.mechanisms.no_effect import NoEffectWarning

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
        capacity_bytes: reserved at once; the file grows beyond it when it has to.

    Raises:
        HostError: the folder is missing, cannot be written to, or has not ``capacity_bytes`` left.
        ValueError: the device is not the CPU.
    """

    def __init__(self, folder: str | Path, *, device: torch.device | str = "cpu", capacity_bytes: int = 0) -> None:
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
            warnings.warn(
                f"host={self.name!r} is a file system in memory: offloading there frees nothing; name a disk's folder",
                NoEffectWarning,
                stacklevel=2,
            )
        self._extents = Extents()
        self._lock = threading.RLock()
        self._reserved = 0
        self._held = 0
        self._closed = False
        self._pool = _started()
        try:
            self._reserve(capacity_bytes)
        except HostError:
            self.close()
            raise

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def reserve(self, nbytes: int, storages: int) -> None:
        with self._lock:
            self._check_open()
            self._reserve(nbytes + storages * self._extents.rounded(1))

    def store(self, source: torch.UntypedStorage) -> _DiskCopy:
        nbytes = source.nbytes()
        with self._lock:
            self._check_open()
            offset = self._extents.take(nbytes)
            try:
                self._reserve(self._extents.end)
            except HostError:
                self._extents.give_back(offset, nbytes)
                raise
            self._held += nbytes
        written = self._pool.submit(_write, self._file.fileno(), source.data_ptr(), nbytes, offset)
        return _DiskCopy(self, source, offset, written)

    def bytes_held(self) -> int:
        return self._held

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
        raise HostError(
            failure.errno,
            f"host={self.name!r} has no space for {nbytes - self._reserved} more bytes beside {self._reserved} "
            f"({failure.strerror}; {self._free()}): {_MAKE_SPACE}",
        ) from failure

    def _free(self) -> str:
        """What the file system says: quotas and limits of a process may be tighter."""
        try:
            found = os.fstatvfs(self._file.fileno())
        except OSError:
            return "free space unknown"
        return f"{found.f_bavail * found.f_frsize} bytes free"

    def _give_back(self, offset: int, nbytes: int) -> None:
        self._extents.give_back(offset, nbytes)
        with self._lock:
            self._held -= nbytes


def _started() -> ThreadPoolExecutor:
    """A thread that runs already, on a small stack: where memory is short, one that starts later may never come up."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix="retime-host-disk")
        pool.submit(threading.get_ident).result()
    finally:
        threading.stack_size(before)
    return pool


class _DiskCopy:
    """Holds the source until :meth:`settle`: the thread has only its address."""

    def __init__(self, host: HostDisk, source: torch.UntypedStorage, offset: int, written: Future[None]) -> None:
        self.nbytes = source.nbytes()
        self._host = host
        self._source: torch.UntypedStorage | None = source
        self._offset = offset
        self._written = written
        self._freed = False

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
        read = self._host._pool.submit(_read, descriptor, into.data_ptr(), self.nbytes, self._offset, self._written)
        return _DiskLoading(self, into, read)

    def free(self) -> None:
        if self._freed:
            return
        self._freed = True
        source, self._source = self._source, None
        _hold_until(self._written, source)
        self._host._give_back(self._offset, self.nbytes)

    def __del__(self) -> None:
        self.free()

    def _error(self, what: str, failure: BaseException) -> HostError:
        number = failure.errno if isinstance(failure, OSError) and failure.errno else errno.EIO
        text = f"host={self._host.name!r} could not be {what}: {failure}"
        return HostError(number, f"{text}. {_MAKE_SPACE.capitalize()}" if number in _FULL else text)


class _DiskLoading:
    """Holds the copy and the target until the thread has filled it."""

    def __init__(self, copy: _DiskCopy, into: torch.UntypedStorage, read: Future[None]) -> None:
        self._copy = copy
        self._into = into
        self._read = read

    def wait(self) -> bool:
        waited = not self._read.done()
        failure = self._read.exception()
        if failure is not None:
            error = self._copy._error("read", failure)
            raise HostError(error.errno, f"{error.strerror}; gradients may be incomplete: zero them") from failure
        return waited

    def __del__(self) -> None:
        _hold_until(self._read, self._into)


def _hold_until(copied: Future[None], storage: torch.UntypedStorage | None) -> None:
    """Until then the thread has only the storage's address."""
    held = [storage]
    copied.add_done_callback(lambda _: held.clear())


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _write(descriptor: int, address: int, nbytes: int, offset: int) -> None:
    view, done = _memory_at(address, nbytes), 0
    while done < nbytes:
        done += os.pwrite(descriptor, view[done : done + _CALL_BYTES], offset + done)


def _read(descriptor: int, address: int, nbytes: int, offset: int, written: Future[None]) -> None:
    written.result()
    view, done = _memory_at(address, nbytes), 0
    while done < nbytes:
        read = os.preadv(descriptor, [view[done : done + _CALL_BYTES]], offset + done)
        if read == 0:
            raise OSError(errno.EIO, f"the file ends {nbytes - done} bytes early")
        done += read


def _is_memory(folder: Path) -> bool:
    """Whether the folder lies on tmpfs or ramfs."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    folder = folder.resolve()
    under = [(len(Path(where).parts), kind) for _, where, kind, *_ in mounts if folder.is_relative_to(where)]
    # Of several mounts on one folder the last one counts.
    return bool(under) and max(reversed(under), key=lambda mount: mount[0])[1] in ("tmpfs", "ramfs")
