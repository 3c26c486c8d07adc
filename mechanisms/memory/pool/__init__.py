"""Where freed CPU memory goes: a pool that keeps it for the next tensors, and the heap behind it."""

from retime.mechanisms.memory.pool.freed_memory import FreedMemory
from retime.mechanisms.memory.pool.heap import give_back_freed_memory, trim_heap
from retime.mechanisms.memory.pool.memory_pool import POOLED_BYTES, MemoryPool, within
from retime.mechanisms.memory.pool.report import PoolReport

__all__ = [
    "POOLED_BYTES",
    "FreedMemory",
    "MemoryPool",
    "PoolReport",
    "give_back_freed_memory",
    "trim_heap",
    "within",
]
