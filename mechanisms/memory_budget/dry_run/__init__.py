"""What a step needs, found without memory and without training: traces, profiles, replays under a plan."""

from retime.mechanisms.memory_budget.dry_run.profile import LargestTask, Lifetimes, Size, StepProfile, task_graph
from retime.mechanisms.memory_budget.dry_run.run import (
    EVERYTHING,
    Buckets,
    DryRun,
    Gradients,
    TrainingStep,
    check_held,
    everything,
    profile_step,
    replay,
)
from retime.mechanisms.memory_budget.dry_run.trace import AllocatedBytes, Operation, TooMuchAllocated
