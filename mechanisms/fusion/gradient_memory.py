"""Where the gradients of a fused optimizer lie on a CPU: in the pool, which keeps what they leave for the next ones.

Backward fusion frees a gradient as soon as it is used up, and the next one of its size could take the same place, which
the cache still has. Forward fusion frees them one by one in the next forward pass, and the C library may give each back
to the kernel, which clears it for the backward pass to come. Both are the C library's choice and differ from process to
process. So what a backward pass allocates behind its first gradient comes from the pool, whose last freed block of a
size comes first. Nothing else of the process does.

Whether that pays depends on the network and on the allocator: the first backward passes try both in turn. Where all
tensors come from the pool anyway, there is nothing to try.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

from torch import Tensor

from retime.foundations.cpu_pool import MemoryPool
from retime.foundations.torch_private import queue_callback

__all__ = ["GradientMemory"]

WARM_UP = 3
"""Backward passes before the trial: optimizer states are made, and the pool's memory is mapped."""
TRIED = 6
"""Backward passes of each kind in the trial."""
_SLACK = 1.1
_EVERYWHERE = "gradients lie in the pool, as all large tensors of the process do"
_SMALLEST_BYTES = 256 * 1024
"""Gradients that are smaller lie in the cache wherever they are."""


class GradientMemory:
    """Switches the pool on in backward passes, as long as they are not slower for it.

    Args:
        parameters: whose gradients count.
        clock: in seconds.

    Attributes:
        decision: what the trial found, for a report; empty before.
        wanted: whether there is anything to put into the pool.
    """

    def __init__(self, parameters: Iterable[Tensor], clock: Callable[[], float] = time.perf_counter) -> None:
        self.decision = ""
        self._clock = clock
        self._pool = MemoryPool(everywhere=False)
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._passes = 0
        self._inside = False
        self._started: float | None = None
        sizes = [parameter.nbytes for parameter in parameters if parameter.device.type == "cpu"]
        self.wanted = bool(sizes) and max(sizes) >= _SMALLEST_BYTES

    def first_gradient(self) -> None:
        """To be called with every gradient: the first one of a backward pass begins it."""
        if not self.wanted or self._inside:
            return
        if MemoryPool.has_everything() and not self._pool.installed:
            self.decision = _EVERYWHERE
            return
        if not self._pool.installed and not self._install():
            return
        self._inside = True
        queue_callback(self._end)
        pooled = self._is_pooled()
        self._pool.turn_here(pooled)
        self._started = self._clock()

    def interrupted(self) -> None:
        """A backward pass may not have come to its end."""
        if self._inside:
            self._inside = False
            self._pool.turn_here(False)

    def remove(self) -> None:
        """Give the pool up; a fusion that goes on does without."""
        if self._pool.installed:
            self._pool.turn_here(False)
            self._pool.remove()
        self.wanted = self._inside = False

    def _install(self) -> bool:
        if self._pool.install():
            self._pool.follow(_SLACK)
            return True
        self.wanted = False
        self.decision = f"gradients lie where the C library puts them: {self._pool.why_not}"
        return False

    def _is_pooled(self) -> bool:
        """In this pass: always, but for half of the trial's."""
        tried = self._passes - WARM_UP
        return tried < 0 or tried >= 2 * TRIED or tried % 4 in (0, 3)

    def _end(self) -> None:
        """At the end of the backward pass."""
        if not self._inside:  # removed in it
            return
        self._inside = False
        self._pool.turn_here(False)
        took, tried = self._clock() - (self._started or 0.0), self._passes - WARM_UP
        if 0 <= tried < 2 * TRIED:
            self._times[self._is_pooled()].append(took)
        self._passes += 1
        if self._passes == WARM_UP + 2 * TRIED:
            self._decide()

    def _decide(self) -> None:
        ratio = median(self._times[True]) / median(self._times[False])
        if ratio <= 1:
            self.decision = f"gradients lie in the pool: backward passes take {ratio:.3f} of the time"
        else:
            self.remove()
            self.decision = f"gradients lie where the C library puts them: with the pool {ratio:.3f} of the time"
