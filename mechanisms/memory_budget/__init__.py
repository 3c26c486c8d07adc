"""Training inside a byte budget: profile, offload, sub-batches (Chen et al. 2019, moDNN)."""

from retime.mechanisms.memory_budget.costs import StepCosts, calibrate
from retime.mechanisms.memory_budget.data_parallel import (
    SETTING_UP,
    BudgetedDataParallelStep,
    bucket_bytes,
    buckets_of,
    gloo_bytes,
    reduction_bytes,
)
from retime.mechanisms.memory_budget.dry_run import (
    DryRun,
    Gradients,
    StepProfile,
    TooMuchAllocated,
    TrainingStep,
    profile_step,
    replay,
    task_graph,
)
from retime.mechanisms.memory_budget.offload import (
    HostDisk,
    HostError,
    HostMemory,
    HostNull,
    HostTier,
    OffloadReport,
    OffloadSavedTensors,
    PlanMismatch,
    ResidentTensor,
    check_host_text,
    parse_host,
)
from retime.mechanisms.memory_budget.plan_files import PlanFileError, read_plans, write_plans
from retime.mechanisms.memory_budget.planner import BudgetOptions, DryRuns, StepPlanner
from retime.mechanisms.memory_budget.report import (
    AnotherPath,
    BudgetReport,
    OnShapeChange,
    PlannedShape,
    parse_budget,
    warn_of_dropped,
)
from retime.mechanisms.memory_budget.search import PlanChoice, part_sizes, search_plan
from retime.mechanisms.memory_budget.separability import certify
from retime.mechanisms.memory_budget.step import BudgetedStep, ExecutionMode, NoLossError
from retime.mechanisms.memory_budget.step_memory import MemoryFloor, StepMemory
from retime.mechanisms.memory_budget.sub_batches import SubBatches

__all__ = [
    "AnotherPath",
    "BudgetOptions",
    "BudgetReport",
    "BudgetedDataParallelStep",
    "BudgetedStep",
    "DryRun",
    "DryRuns",
    "Gradients",
    "HostDisk",
    "HostError",
    "HostMemory",
    "HostNull",
    "HostTier",
    "MemoryFloor",
    "NoLossError",
    "OffloadReport",
    "OffloadSavedTensors",
    "OnShapeChange",
    "PlanChoice",
    "PlanMismatch",
    "PlanFileError",
    "PlannedShape",
    "ResidentTensor",
    "SETTING_UP",
    "StepCosts",
    "StepMemory",
    "StepPlanner",
    "StepProfile",
    "SubBatches",
    "TooMuchAllocated",
    "TrainingStep",
    "ExecutionMode",
    "bucket_bytes",
    "buckets_of",
    "calibrate",
    "certify",
    "check_host_text",
    "gloo_bytes",
    "parse_budget",
    "parse_host",
    "part_sizes",
    "profile_step",
    "read_plans",
    "reduction_bytes",
    "replay",
    "search_plan",
    "task_graph",
    "warn_of_dropped",
    "write_plans",
]
