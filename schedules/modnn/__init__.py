"""The paper's own planner, simulated: sub-batch sizes, offloading and prefetching (Chen et al. 2019, moDNN)."""

from retime.schedules.modnn.bounds import (
    Floor,
    all_blocks_bytes,
    consecutive_bytes,
    ideal_peak_bytes,
    lower_bound,
    lower_bound_offloading_weights,
)
from retime.schedules.modnn.device import COMPUTE, Copy, Direction, OffloadSchedule, Placement, Stall
from retime.schedules.modnn.offload_schedule import Techniques, offload_schedule
from retime.schedules.modnn.planner import BatchPlan, Candidate, plan_batch, plan_vdnn
from retime.schedules.modnn.vdnn import vdnn_schedule

__all__ = [
    "BatchPlan",
    "COMPUTE",
    "Candidate",
    "Copy",
    "Direction",
    "Floor",
    "OffloadSchedule",
    "Placement",
    "Stall",
    "Techniques",
    "all_blocks_bytes",
    "consecutive_bytes",
    "ideal_peak_bytes",
    "lower_bound",
    "lower_bound_offloading_weights",
    "offload_schedule",
    "plan_batch",
    "plan_vdnn",
    "vdnn_schedule",
]
