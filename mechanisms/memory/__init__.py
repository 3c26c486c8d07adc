"""Training inside a byte budget: profile, offload, sub-batches (Chen et al. 2018, moDNN)."""

from retime.mechanisms.memory.batches.certificate import Certificate
from retime.mechanisms.memory.data_parallel.budgeted_step import BudgetedDataParallelStep
from retime.mechanisms.memory.dry_run.profile import StepProfile
from retime.mechanisms.memory.dry_run.replay import DryRun, TrainingStep, profile_step, replay
from retime.mechanisms.memory.dry_run.task_graph import task_graph
from retime.mechanisms.memory.host.disk import HostDisk
from retime.mechanisms.memory.host.null import HostNull
from retime.mechanisms.memory.host.parse import parse_host
from retime.mechanisms.memory.host.pinned import HostMemory
from retime.mechanisms.memory.host.tier import HostError, HostTier
from retime.mechanisms.memory.offload.saved_tensors import OffloadReport, OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory.planning.calibrate import calibrate
from retime.mechanisms.memory.planning.costs import StepCosts
from retime.mechanisms.memory.planning.floor import MemoryFloor, StepMemory
from retime.mechanisms.memory.planning.search import PlanChoice, part_sizes, search_plan
from retime.mechanisms.memory.pool.heap import give_back_freed_memory, trim_heap
from retime.mechanisms.memory.sandbox.value_reads import ValueReadError
from retime.mechanisms.memory.separability.certify import certify
from retime.mechanisms.memory.step.budgeted_step import BudgetedStep
from retime.mechanisms.memory.step.sub_batches import SubBatches

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
