"""What a step needs, found without memory and without training: traces, profiles, replays under a plan."""

from retime.mechanisms.memory_budget.dry_run.allocated_bytes import AllocatedBytes, TooMuchAllocated
from retime.mechanisms.memory_budget.dry_run.gradients import Buckets, Gradients, check_held
from retime.mechanisms.memory_budget.dry_run.lifetimes import Lifetimes
from retime.mechanisms.memory_budget.dry_run.profile import LargestTask, Size, StepProfile
from retime.mechanisms.memory_budget.dry_run.replay import EVERYTHING, everything, profile_step, replay
from retime.mechanisms.memory_budget.dry_run.run import DryRun
from retime.mechanisms.memory_budget.dry_run.task_graph import task_graph
from retime.mechanisms.memory_budget.dry_run.trace import Operation
from retime.mechanisms.memory_budget.dry_run.training_step import TrainingStep

__all__ = [
    "AllocatedBytes",
    "Buckets",
    "DryRun",
    "EVERYTHING",
    "Gradients",
    "LargestTask",
    "Lifetimes",
    "Operation",
    "Size",
    "StepProfile",
    "TooMuchAllocated",
    "TrainingStep",
    "check_held",
    "everything",
    "profile_step",
    "replay",
    "task_graph",
]
