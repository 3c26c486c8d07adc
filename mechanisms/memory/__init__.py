"""Training inside a byte budget: profile, offload, sub-batches (Chen et al. 2018, moDNN)."""

from retime.mechanisms.memory.batches import Certificate
from retime.mechanisms.memory.data_parallel import BudgetedDataParallelStep
from retime.mechanisms.memory.dry_run import DryRun, StepProfile, TrainingStep, profile_step, replay, task_graph
from retime.mechanisms.memory.host import HostDisk, HostError, HostMemory, HostNull, HostTier, parse_host
from retime.mechanisms.memory.offload import OffloadReport, OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory.planning import (
    MemoryFloor,
    PlanChoice,
    StepCosts,
    StepMemory,
    calibrate,
    part_sizes,
    search_plan,
)
from retime.mechanisms.memory.pool import give_back_freed_memory, trim_heap
from retime.mechanisms.memory.sandbox import ValueReadError
from retime.mechanisms.memory.separability import certify
from retime.mechanisms.memory.step import BudgetedStep, SubBatches

__all__ = [
    "BudgetedDataParallelStep",
    "BudgetedStep",
    "Certificate",
    "DryRun",
    "HostDisk",
    "HostError",
    "HostMemory",
    "HostNull",
    "HostTier",
    "MemoryFloor",
    "OffloadReport",
    "OffloadSavedTensors",
    "PlanChoice",
    "PlanMismatch",
    "StepCosts",
    "StepMemory",
    "StepProfile",
    "SubBatches",
    "TrainingStep",
    "ValueReadError",
    "calibrate",
    "certify",
    "give_back_freed_memory",
    "part_sizes",
    "parse_host",
    "profile_step",
    "replay",
    "search_plan",
    "task_graph",
    "trim_heap",
]
