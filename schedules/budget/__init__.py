"""A byte budget's plans as data: the task graph of a training step, what leaves the device, and the refusal."""

from retime.schedules.budget.errors import BudgetError
from retime.schedules.budget.graph import STAYS, Algorithm, Block, BlockKind, GraphTask, Phase, TaskGraph
from retime.schedules.budget.plan import OffloadPlan

__all__ = [
    "STAYS",
    "Algorithm",
    "Block",
    "BlockKind",
    "BudgetError",
    "GraphTask",
    "OffloadPlan",
    "Phase",
    "TaskGraph",
]
