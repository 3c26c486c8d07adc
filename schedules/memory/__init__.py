"""Training inside a byte budget: sub-batch sizes, offloading and prefetching (Chen et al. 2018, moDNN)."""

from retime.schedules.memory.graph import STAYS, Algorithm, Block, BlockKind, GraphTask, Phase, TaskGraph
from retime.schedules.memory.plan import OffloadPlan

__all__ = ["STAYS", "Algorithm", "Block", "BlockKind", "GraphTask", "OffloadPlan", "Phase", "TaskGraph"]
