"""Freed tensors give their pages back: without that, memory on a CPU never shrinks, whatever leaves it."""

from __future__ import annotations

import ctypes
from typing import Annotated

from retime.foundations.arguments import AtLeast, checked

MMAP_THRESHOLD_BYTES = 64 * 1024
_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_M_TRIM_THRESHOLD = -1


@checked
def give_back_freed_memory(threshold_bytes: Annotated[int, AtLeast(0)] = MMAP_THRESHOLD_BYTES) -> bool:
    """Have the C library map blocks from this size on, and unmap them when they are freed; whether it could be asked.

    By itself the GNU C library raises this threshold to the largest block that was freed so far (up to 32 MiB) and
    keeps smaller ones in a heap that shrinks at its end only. Each mapped block starts with pages that the kernel has
    to clear, which costs time: ask for it only where memory is short.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, threshold_bytes) and mallopt(_M_TRIM_THRESHOLD, threshold_bytes))


def trim_heap() -> bool:
    """Give back what the heap holds free; whether there was anything, False also where it cannot be asked."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (AttributeError, OSError):
        return False
