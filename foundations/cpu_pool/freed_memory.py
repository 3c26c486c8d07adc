"""What becomes of the memory that tensors have freed: the next tensors' while a plan has room for it, else nobody's."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from retime.foundations.cpu_pool.heap import give_back_freed_memory, trim_heap
from retime.foundations.cpu_pool.memory_pool import MemoryPool
from retime.foundations.measure import forget_peak


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
        """From now on :meth:`peak_bytes` counts."""
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
