"""Sums of gradients in host memory, which the ranks of one machine share."""

from retime.mechanisms.ddp.shared_memory.shared_sum import RankLostError, SharedSum, SumTimes
from retime.mechanisms.ddp.shared_memory.sums import GlooSums, HostSums, MachineSums, host_sums

__all__ = ["GlooSums", "HostSums", "MachineSums", "RankLostError", "SharedSum", "SumTimes", "host_sums"]
