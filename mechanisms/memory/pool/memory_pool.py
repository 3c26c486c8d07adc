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
from dataclasses import dataclass

import torch
from torch import Tensor

from retime.mechanisms.memory.pool.library import NoPoolError, pool_library
from retime.mechanisms.torch_private import storage_address

_installed = 0


def _leave(library: ctypes.CDLL) -> None:
    """One user less."""
    global _installed
    _installed -= 1
    if not _installed:
        library.retime_pool_remove()


@dataclass(frozen=True)
class PoolCounts:
    """Bytes of whole pages.

    Attributes:
        live: of tensors.
        kept: free, to be used again.
        peak_live, peak_held: the most since :meth:`MemoryPool.reset_peaks`; held are live and kept together.
        mapped: asked of the kernel since then.
        reused: taken from what was kept since then.
    """

    live: int
    kept: int
    peak_live: int
    peak_held: int
    mapped: int
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
        pool.limit(0)
        pool.remove()


class MemoryPool:
    """The process's one pool; every object of this class stands for it.

    From :meth:`install` on, CPU tensors of 16 KiB and more come from it, as does oneDNN's scratch. It is a
    process-wide switch, as an allocator is; several users share the pool, and the last :meth:`remove` takes it away.
    Tensors may outlive that.

    Attributes:
        why_not: after :meth:`install`, why there is no pool; empty if there is.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._on = False

    def install(self) -> bool:
        """Let tensors come from the pool; whether they do. The first time ever, it is compiled (seconds)."""
        global _installed
        library = pool_library()
        if isinstance(library, NoPoolError):
            self.why_not = str(library)
            return False
        if not self._on:
            if not _installed and not library.retime_pool_install():
                self.why_not = "another library's allocator takes precedence over the pool"
                return False
            _installed += 1
            self._on = True
            self._leave = weakref.finalize(self, _leave, library)  # for those who forget to remove it
            self._leave.atexit = False
        return True

    def remove(self) -> None:
        """Let new tensors come from torch's own allocator again, and give back all that was kept."""
        if self._on:
            self._leave()
        self._on = False

    def limit(self, nbytes: int) -> None:
        """Keep no more than leaves live tensors and what is kept below ``nbytes``; 0 keeps nothing.

        Live tensors are not limited: whoever plans sees to them.
        """
        if self._on:
            self._library.retime_pool_limit(max(0, nbytes))

    def counts(self) -> PoolCounts:
        """What the pool holds.

        Raises:
            RuntimeError: it is not installed.
        """
        numbers = (ctypes.c_int64 * 6)()
        self._library.retime_pool_counts(numbers)
        return PoolCounts(*numbers)

    def reset_peaks(self) -> None:
        """Forget peaks, and what was mapped and reused."""
        self._library.retime_pool_reset_peaks()

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
        return self._on

    @property
    def _library(self) -> ctypes.CDLL:
        library = pool_library()
        if not self._on or isinstance(library, NoPoolError):
            raise RuntimeError("the pool is not installed: call install() first")
        return library
