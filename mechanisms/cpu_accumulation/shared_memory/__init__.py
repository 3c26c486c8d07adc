"""Sums of gradients in host memory, which the ranks of one machine share."""

from retime.mechanisms.cpu_accumulation.shared_memory.shared_sum import SharedSum, SumTimes
from retime.mechanisms.cpu_accumulation.shared_memory.sums import GlooSums, HostSums, MachineSums, host_sums

__all__ = [
    "GlooSums",
    "HostSums",
    "MachineSums",
    "SharedSum",
    "SumTimes",
    "host_sums",
]
