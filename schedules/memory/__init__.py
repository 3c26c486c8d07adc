"""Training inside a byte budget: sub-batch sizes, offloading and prefetching (Chen et al. 2018, moDNN)."""

from retime.schedules.memory.bounds import (
    Floor,
    all_blocks_bytes,
    ideal_peak_bytes,
    lower_bound,
    lower_bound_offloading_weights,
)
from retime.schedules.memory.chain import vgg_chain
from retime.schedules.memory.errors import BudgetError
from retime.schedules.memory.graph import STAYS, Algorithm, Block, BlockKind, GraphTask, Phase, TaskGraph
from retime.schedules.memory.offload_schedule import Techniques, offload_schedule
from retime.schedules.memory.plan import OffloadPlan
from retime.schedules.memory.planner import BatchPlan, Candidate, plan_batch, plan_vdnn
from retime.schedules.memory.result import Copy, Direction, OffloadSchedule, Placement, Stall
from retime.schedules.memory.sub_batch import ALPHA, consecutive_bytes, regular, select_sub_batch
from retime.schedules.memory.vdnn import vdnn_schedule

__all__ = [
    "ALPHA",
    "STAYS",
    "Algorithm",
    "BatchPlan",
    "Block",
    "BlockKind",
    "BudgetError",
    "Candidate",
    "Copy",
    "Direction",
    "Floor",
    "GraphTask",
    "OffloadPlan",
    "OffloadSchedule",
    "Phase",
    "Placement",
    "Stall",
    "TaskGraph",
    "Techniques",
    "all_blocks_bytes",
    "consecutive_bytes",
    "ideal_peak_bytes",
    "lower_bound",
    "lower_bound_offloading_weights",
    "offload_schedule",
    "plan_batch",
    "plan_vdnn",
    "regular",
    "select_sub_batch",
    "vdnn_schedule",
    "vgg_chain",
]
