"""Where freed CPU memory goes: a pool that keeps it for the next tensors, and the heap behind it."""

from retime.foundations.cpu_pool.pool import (
    POOLED_BYTES,
    FreedMemory,
    MemoryPool,
    PoolReport,
    give_back_freed_memory,
    trim_heap,
    within,
)

__all__ = ["FreedMemory", "MemoryPool", "POOLED_BYTES", "PoolReport", "give_back_freed_memory", "trim_heap", "within"]
