"""Budgeted steps under DistributedDataParallel (moDNN, section 6)."""

from retime.mechanisms.memory_budget.data_parallel.budgeted_step import SETTING_UP, BudgetedDataParallelStep
from retime.mechanisms.memory_budget.data_parallel.ddp_memory import (
    bucket_bytes,
    buckets_of,
    gloo_bytes,
    reduction_bytes,
)

__all__ = [
    "BudgetedDataParallelStep",
    "SETTING_UP",
    "bucket_bytes",
    "buckets_of",
    "gloo_bytes",
    "reduction_bytes",
]
