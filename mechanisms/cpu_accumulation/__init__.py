"""Gradients added up in memory that ranks share, and updates divided between them: what CPU accumulation is made of."""

from retime.mechanisms.cpu_accumulation.host_update import HostUpdate, HostUpdateReport
from retime.mechanisms.cpu_accumulation.reduction import BucketReduction, HostReducer, HostReductionReport, TimedSum
from retime.mechanisms.cpu_accumulation.shared_sums import SumTimes

__all__ = [
    "BucketReduction",
    "HostReducer",
    "HostReductionReport",
    "HostUpdate",
    "HostUpdateReport",
    "SumTimes",
    "TimedSum",
]
