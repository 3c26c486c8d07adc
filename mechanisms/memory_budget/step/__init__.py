"""Training steps inside a byte budget: planning and execution put together."""

from retime.mechanisms.memory_budget.step.batch_record import BatchRecord
from retime.mechanisms.memory_budget.step.budgeted_step import BudgetedStep
from retime.mechanisms.memory_budget.step.first_steps import check_dry_run
from retime.mechanisms.memory_budget.step.graph_paths import AnotherPath
from retime.mechanisms.memory_budget.step.shape_changes import check_on_shape_change, warn_of_dropped, warn_of_no_plan
from retime.mechanisms.memory_budget.step.sub_batches import SubBatches
from retime.mechanisms.memory_budget.step.way import NoLossError, Way

__all__ = [
    "AnotherPath",
    "BatchRecord",
    "BudgetedStep",
    "NoLossError",
    "SubBatches",
    "Way",
    "check_dry_run",
    "check_on_shape_change",
    "warn_of_dropped",
    "warn_of_no_plan",
]
