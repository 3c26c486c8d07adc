"""Gradients added up in memory that ranks share, and updates divided between them: what CPU accumulation is made of."""

from retime.mechanisms.cpu_accumulation.bucket_reduction import BucketReduction
from retime.mechanisms.cpu_accumulation.host_reducer import HostReducer, TimedSum
from retime.mechanisms.cpu_accumulation.host_report import HostReductionReport
from retime.mechanisms.cpu_accumulation.host_update import HostUpdate, HostUpdateReport
from retime.mechanisms.cpu_accumulation.shared_memory import SumTimes

__all__ = [
    "BucketReduction",
    "HostReducer",
    "HostReductionReport",
    "HostUpdate",
    "HostUpdateReport",
    "SumTimes",
    "TimedSum",
]
