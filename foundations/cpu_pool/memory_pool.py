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
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from retime.foundations.cpu_pool.library import pool_library
from retime.foundations.cpu_pool.wishes import Wish, Wishes
from retime.foundations.native import NoLibraryError
from retime.foundations.torch_private import storage_address

POOLED_BYTES = 16 * 1024
"""Smaller tensors come from the C library, as the pool's machine code says."""

_WISHES = Wishes()


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

    Args:
        everywhere: tensors of the whole process come from it; otherwise those of threads that
            :meth:`turn_here` switched on.

    Attributes:
        why_not: after :meth:`install`, why there is no pool; empty if there is.
    """

    def __init__(self, everywhere: bool = True) -> None:
        self.why_not = ""
        self._wish = Wish(everywhere)
        self._user: int | None = None
        self._before = (0, 0, 0)

    def __reduce__(self) -> tuple[type[MemoryPool], tuple[bool]]:
        """A copy, and one that is sent to another process, has not installed the pool."""
        return MemoryPool, (self._wish.everywhere,)

    @staticmethod
    def has_everything() -> bool:
        """Whether large tensors of the whole process come from the pool, for whichever user."""
        return _WISHES.everywhere

    def install(self) -> bool:
        """Let tensors come from the pool; whether they do. The first time ever, it is compiled (seconds)."""
        library = pool_library()
        if isinstance(library, NoLibraryError):
            self.why_not = str(library)
            return False
        if self._user is None:
            if not _WISHES and not library.retime_pool_install():
                self.why_not = "another library's allocator takes precedence over the pool"
                return False
            self._user = _WISHES.enter(library, self._wish)
            self._leave = weakref.finalize(
                self, _WISHES.leave, library, self._user
            )  # for those who forget to remove it
            self._leave.atexit = False
        return True

    def remove(self) -> None:
        """Let new tensors come from torch's own allocator again, and give back all that was kept."""
        if self._user is not None:
            self._leave()
        self._user = None
        self._wish = Wish(self._wish.everywhere)

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

    def turn_here(self, on: bool) -> None:
        """Whether tensors that this thread makes from now on come from the pool although others' do not."""
        self._library.retime_pool_here(on)

    def _ask(self, limit: int | None = None, slack: float | None = None) -> None:
        if self._user is not None:
            self._wish = replace(self._wish, limit=limit, slack=slack)
            _WISHES.change(self._library, self._user, self._wish)

    def counts(self) -> PoolCounts:
        """What the pool holds.

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
        """Whether this object has installed it."""
        return self._user is not None

    @property
    def _library(self) -> ctypes.CDLL:
        library = pool_library()
        if self._user is None or isinstance(library, NoLibraryError):
            raise RuntimeError("the pool is not installed: call install() first")
        return library
