"""Where freed CPU memory goes: a pool that keeps it for the next tensors, and the heap behind it."""

from retime.foundations.cpu_pool.freed_memory import FreedMemory
from retime.foundations.cpu_pool.heap import give_back_freed_memory, trim_heap
from retime.foundations.cpu_pool.memory_pool import POOLED_BYTES, MemoryPool, within
from retime.foundations.cpu_pool.report import PoolReport

__all__ = [
    "FreedMemory",
    "MemoryPool",
    "POOLED_BYTES",
    "PoolReport",
    "give_back_freed_memory",
    "trim_heap",
    "within",
]
