"""A byte budget's plans as data: the task graph of a training step, what leaves the device, and the refusal."""

from retime.schedules.budget.errors import BudgetError, sized
from retime.schedules.budget.graph import STAYS, Algorithm, Block, BlockKind, GraphTask, Phase, TaskGraph
from retime.schedules.budget.plan import MOST_SAVED, OffloadPlan

__all__ = [
    "Algorithm",
    "Block",
    "BlockKind",
    "BudgetError",
    "GraphTask",
    "MOST_SAVED",
    "OffloadPlan",
    "Phase",
    "STAYS",
    "TaskGraph",
    "sized",
]
