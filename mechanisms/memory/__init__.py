"""Training inside a byte budget: profile, offload, sub-batches (Chen et al. 2018, moDNN)."""

from retime.mechanisms.memory.budgeted_ddp import BudgetedDataParallelStep
from retime.mechanisms.memory.budgeted_step import BudgetedStep
from retime.mechanisms.memory.calibrate import calibrate
from retime.mechanisms.memory.certificate import Certificate
from retime.mechanisms.memory.costs import StepCosts
from retime.mechanisms.memory.floor import MemoryFloor, StepMemory
from retime.mechanisms.memory.heap import give_back_freed_memory, trim_heap
from retime.mechanisms.memory.host import HostError, HostTier, parse_host
from retime.mechanisms.memory.host_disk import HostDisk
from retime.mechanisms.memory.host_memory import HostMemory
from retime.mechanisms.memory.host_null import HostNull
from retime.mechanisms.memory.offload import OffloadReport, OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory.profile import StepProfile
from retime.mechanisms.memory.replay import DryRun, TrainingStep, profile_step, replay
from retime.mechanisms.memory.search import PlanChoice, part_sizes, search_plan
from retime.mechanisms.memory.separability import certify
from retime.mechanisms.memory.sub_batches import SubBatches
from retime.mechanisms.memory.task_graph import task_graph
from retime.mechanisms.memory.trace import ValueReadError

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
