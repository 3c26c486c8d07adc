"""Large CPU tensors from a pool that keeps freed memory for the next ones, up to a limit (moDNN, section 3.3).

    pool = MemoryPool()
    if pool.install():
        pool.limit(plan_bytes)      # live tensors and what is kept stay below it together
    ...
    pool.remove()

What the C library offers instead costs memory or time: its heap grows by a third and more over what is alive, and
blocks that it gives back when they are freed have to be cleared by the kernel when they come again.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from retime.foundations.measure import forget_peak
from retime.foundations.messages import Report, show_bytes
from retime.foundations.native import NoLibraryError, Source
from retime.foundations.torch_private.tensors import storage_address

# Freed tensors give their pages back: without that, memory on a CPU never shrinks, whatever leaves it.

MMAP_THRESHOLD_BYTES = 64 * 1024
_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_M_TRIM_THRESHOLD = -1


def give_back_freed_memory() -> bool:
    """Have the C library map blocks of 64 KiB and more, and unmap them when they are freed; whether it could be asked.

    By itself the GNU C library raises this threshold to the largest block that was freed so far (up to 32 MiB) and
    keeps smaller ones in a heap that shrinks at its end only. Each mapped block starts with pages that the kernel has
    to clear, which costs time: ask for it only where memory is short.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, MMAP_THRESHOLD_BYTES))


def trim_heap() -> bool:
    """Give back what the heap holds free; whether there was anything, False also where it cannot be asked."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (AttributeError, OSError):
        return False


# The pool's machine code.


def _declare(library: ctypes.CDLL) -> None:
    library.retime_pool_install.restype = ctypes.c_bool
    library.retime_pool_limit.argtypes = [ctypes.c_int64]
    library.retime_pool_size_of.argtypes = [ctypes.c_void_p]
    library.retime_pool_size_of.restype = ctypes.c_int64
    library.retime_pool_follow.argtypes = [ctypes.c_double]
    for name in ("remove", "counts", "reset_peaks", "begin_window"):
        getattr(library, f"retime_pool_{name}")


POOL = Source("pool", "the pool", Path(__file__).parent, "pool.cpp", _declare)


@cache
def pool_library() -> ctypes.CDLL | NoLibraryError:
    """The library, or the reason why there is none."""
    return POOL.library()


# What a pool of CPU memory did for the tensors that came from it.


@dataclass(frozen=True)
class PoolReport(Report):
    """Bytes of whole pages since the pool was installed.

    Attributes:
        reused_bytes: allocations that were served from free memory as it lay.
        moved_bytes: of allocations that were put together from free memory in pieces, neither copied nor cleared.
        mapped_bytes: asked of the kernel, which cleared them.
        live_bytes: of tensors now.
        retained_bytes: free now, for the next tensors.
        note: why there is no pool; empty if there is.
    """

    reused_bytes: int = 0
    moved_bytes: int = 0
    mapped_bytes: int = 0
    live_bytes: int = 0
    retained_bytes: int = 0
    note: str = ""

    @property
    def faults_avoided(self) -> int:
        """First accesses of a page that a C library would have caused that maps each of these blocks anew."""
        return (self.reused_bytes + self.moved_bytes) // mmap.PAGESIZE

    def what_was_done(self) -> list[str]:
        if self.note:
            return ["no CPU memory pool"]
        allocated = self.reused_bytes + self.moved_bytes + self.mapped_bytes
        share = (self.reused_bytes + self.moved_bytes) / allocated if allocated else 0.0
        moved = show_bytes(self.moved_bytes)
        return [f"CPU memory pool: {share:.1%} of {show_bytes(allocated)} reused ({moved} of it moved together)"]

    def what_stayed_plain(self) -> list[str]:
        return [self.note] if self.note else []

    def what_was_measured(self) -> list[str]:
        if self.note:
            return []
        live, retained = show_bytes(self.live_bytes), show_bytes(self.retained_bytes)
        return [f"{self.faults_avoided} page faults avoided; {live} live and {retained} retained now"]


# What the users of the process's one pool ask for, and what it does for all of them together.


@dataclass(frozen=True)
class PoolRequest:
    """Request of one user to the pool.

    Attributes:
        limit: bytes of live and retained memory together; None leaves it to ``slack``.
        slack: the limit follows the most that was alive, times this; None leaves it to the others.
    """

    limit: int | None = None
    slack: float | None = None


class PoolRequests:
    """All users' requests: the last limit is the promise of the step that runs; without one the largest slack holds."""

    def __init__(self) -> None:
        self._of: dict[int, PoolRequest] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._of)

    def enter(self, library: ctypes.CDLL, request: PoolRequest) -> int:
        """One user more; the number by which it is known."""
        self._next += 1
        self.change(library, self._next, request)
        return self._next

    def change(self, library: ctypes.CDLL, user: int, request: PoolRequest) -> None:
        """Replace what this user asks for."""
        self._of.pop(user, None)
        self._of[user] = request  # behind all others
        self._grant(library)

    def leave(self, library: ctypes.CDLL, user: int) -> None:
        """One user less; the last takes the pool away, and all that was retained goes back."""
        del self._of[user]
        if self._of:
            self._grant(library)
        else:
            library.retime_pool_remove()

    def _grant(self, library: ctypes.CDLL) -> None:
        limits = [request.limit for request in self._of.values() if request.limit is not None]
        slacks = [request.slack for request in self._of.values() if request.slack is not None]
        if slacks and not limits:
            library.retime_pool_follow(max(slacks))
        else:
            library.retime_pool_limit(limits[-1] if limits else 0)


POOLED_BYTES = 16 * 1024
"""Smaller tensors come from the C library, as the pool's machine code says."""

_REQUESTS = PoolRequests()


@dataclass(frozen=True)
class PoolCounts:
    """Bytes of whole pages.

    Attributes:
        live: of tensors.
        free: to be used again.
        peak_live, peak_reserved: the most since :meth:`MemoryPool.reset_peaks`; reserved are live and free together.
        mapped: asked of the kernel since then.
        moved: of free memory that lay in pieces and was moved together since then, neither copied nor cleared.
        reused: taken from what was kept since then, as it lay.
    """

    live: int
    free: int
    peak_live: int
    peak_reserved: int
    mapped: int
    moved: int
    reused: int


@contextmanager
def within(tensors: Iterable[Tensor], nbytes: int) -> Iterator[MemoryPool]:
    """Inside, tensors and what they have freed share ``nbytes`` with ``tensors``; at the end nothing free is kept.

    For tensors of CUDA devices, which have a pool of their own, it does nothing.
    """
    pool, there = MemoryPool(), list(tensors)
    if all(tensor.device.type == "cpu" for tensor in there):
        pool.install()
    try:
        if pool.installed:
            pool.limit(nbytes - pool.bytes_elsewhere(there))
        yield pool
    finally:
        pool.remove()


class MemoryPool:
    """The process's one pool; every object of this class is one of its users.

    From :meth:`install` on, CPU tensors of 16 KiB and more come from it, as does oneDNN's scratch. It is a
    process-wide switch, as an allocator is; several users share the pool, and the last :meth:`remove` takes it away.
    Tensors may outlive that.

    Attributes:
        why_not: after :meth:`install`, why there is no pool; empty if there is.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._request = PoolRequest()
        self._user: int | None = None
        self._before = (0, 0, 0)

    def __reduce__(self) -> tuple[type[MemoryPool], tuple[()]]:
        """A copy, and one that is sent to another process, has not installed the pool."""
        return MemoryPool, ()

    def install(self) -> bool:
        """Let tensors come from the pool; whether they do. The first time ever, it is compiled (seconds)."""
        library = pool_library()
        if isinstance(library, NoLibraryError):
            self.why_not = str(library)
            return False
        if self._user is None:
            if not _REQUESTS and not library.retime_pool_install():
                self.why_not = "another library's allocator takes precedence over the pool"
                return False
            self._user = _REQUESTS.enter(library, self._request)
            self._leave = weakref.finalize(
                self, _REQUESTS.leave, library, self._user
            )  # for those who forget to remove it
            self._leave.atexit = False
        return True

    def remove(self) -> None:
        """Let new tensors come from torch's own allocator again, and give back all that was kept."""
        if self._user is not None:
            self._leave()
        self._user = None
        self._request = PoolRequest()

    def limit(self, nbytes: int) -> None:
        """Keep no more than leaves live tensors and what is kept below ``nbytes``; 0 keeps nothing.

        Live tensors are not limited: whoever plans sees to them. Of several users' limits the last one holds.
        """
        self._ask(limit=max(0, nbytes))

    def follow(self, slack: float) -> None:
        """Keep no more than leaves live tensors and what is kept below ``slack`` times the most that was alive.

        Where another user has set a limit, that holds.
        """
        self._ask(slack=slack)

    def begin_window(self) -> None:
        """The most that was alive is from now on that of the time since the last call, and of this window."""
        self._library.retime_pool_begin_window()

    def _ask(self, limit: int | None = None, slack: float | None = None) -> None:
        if self._user is not None:
            self._request = replace(self._request, limit=limit, slack=slack)
            _REQUESTS.change(self._library, self._user, self._request)

    def counts(self) -> PoolCounts:
        """Count what the pool holds.

        Raises:
            RuntimeError: it is not installed.
        """
        numbers = self._numbers()
        return PoolCounts(*numbers[:4], *(now - before for now, before in zip(numbers[4:], self._before, strict=True)))

    def reset_peaks(self) -> None:
        """Forget peaks, for all users, and what was mapped, moved and reused, for this one."""
        self._library.retime_pool_reset_peaks()
        mapped, moved, reused = self._numbers()[4:]
        self._before = (mapped, moved, reused)

    def _numbers(self) -> list[int]:
        numbers = (ctypes.c_int64 * 7)()
        self._library.retime_pool_counts(numbers)
        return list(numbers)

    def bytes_elsewhere(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of these tensors' CPU storages that are not the pool's."""
        strided = (tensor for tensor in tensors if tensor.layout == torch.strided)  # others have no storage to ask for
        storages = {storage_address(tensor.untyped_storage()): tensor.untyped_storage() for tensor in strided}
        return sum(
            storage.nbytes()
            for storage in storages.values()
            if storage.device.type == "cpu" and not self._library.retime_pool_size_of(storage.data_ptr())
        )

    @property
    def installed(self) -> bool:
        """Return whether this object has installed it."""
        return self._user is not None

    @property
    def _library(self) -> ctypes.CDLL:
        library = pool_library()
        if self._user is None or isinstance(library, NoLibraryError):
            raise RuntimeError("the pool is not installed: call install() first")
        return library


# What becomes of the memory that tensors have freed: the next tensors' while a plan has room for it, else nobody's.


class FreedMemory:
    """Keeps a process to what its plans need: from a pool, or where there is none, by giving all freed memory back.

    For CUDA, whose tensors come from torch's own pool, it does nothing.

    Attributes:
        note: why freed memory is given back at once, which costs time; empty where it is not.
    """

    def __init__(self, device: torch.device) -> None:
        self.note = ""
        self._device = device
        self._live: int | None = None
        self._pool = MemoryPool()
        if device.type != "cpu":
            return
        if not self._pool.install():
            given = give_back_freed_memory()
            cost = "freed memory goes back to the system at once" if given else "freed memory stays in the process"
            self.note = f"{cost}: {self._pool.why_not}"

    def hold(self, nbytes: int, among: Iterable[Tensor]) -> None:
        """Let tensors, and what they have freed, be ``nbytes`` together.

        Args:
            nbytes: of all tensors.
            among: those of them that may have been made before, and are not the pool's.
        """
        if self._pool.installed:
            self._pool.limit(nbytes - self._pool.bytes_elsewhere(among))

    def trim(self) -> None:
        """Give back what Python and the C library keep of objects that are gone, which no limit of tensors counts."""
        if self._device.type == "cpu":
            gc.collect()
            trim_heap()

    def forget_peak(self) -> None:
        """Count :meth:`peak_bytes` from now on."""
        if self._device.type == "cuda":
            forget_peak(self._device)
        elif self._pool.installed:
            self._pool.reset_peaks()
        self._live = self._live_bytes()

    def peak_bytes(self) -> int | None:
        """The most that tensors held beyond what they held at :meth:`forget_peak`; None where nobody counts."""
        if self._live is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._live
        return self._pool.counts().peak_live - self._live

    def _live_bytes(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._pool.counts().live if self._pool.installed else None

    def close(self) -> None:
        """Leave the process's memory to others."""
        self._pool.remove()
