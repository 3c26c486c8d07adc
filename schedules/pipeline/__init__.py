"""Pipeline parallel training: which stage on which rank, and in which order (Oh et al. 2022, section 5.2)."""

from retime.schedules.pipeline.costs import Hops, StageCosts
from retime.schedules.pipeline.gpipe import cross_layer, gpipe
from retime.schedules.pipeline.joined import joined_gradients
from retime.schedules.pipeline.lanes import lane_name
from retime.schedules.pipeline.list_scheduler import Cap, Rule, least_cap, list_schedule
from retime.schedules.pipeline.one_forward_one_backward import (
    WeightStashing,
    interleaved,
    interleaved_zero_bubble,
    one_forward_one_backward,
    weight_stashing,
    zb_h1,
)
from retime.schedules.pipeline.ooo_pipe import FLUSH, GREEDY, fast_forwarded, ooo_pipe1, ooo_pipe2
from retime.schedules.pipeline.placement import Placement, block, even_stages, modulo, v_shape
from retime.schedules.pipeline.search import fastest_list_schedule
from retime.schedules.pipeline.simulation import PipelineTimeline, simulate_pipeline
from retime.schedules.pipeline.synchronisation import synchronised
from retime.schedules.pipeline.torch_csv import from_csv, orders_of, placement_of, to_csv
from retime.schedules.pipeline.validation import validate_pipeline
from retime.schedules.pipeline.zbv import zbv

__all__ = [
    "FLUSH",
    "GREEDY",
    "Cap",
    "Hops",
    "PipelineTimeline",
    "Placement",
    "Rule",
    "StageCosts",
    "WeightStashing",
    "block",
    "cross_layer",
    "even_stages",
    "fast_forwarded",
    "fastest_list_schedule",
    "from_csv",
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "joined_gradients",
    "lane_name",
    "least_cap",
    "list_schedule",
    "modulo",
    "one_forward_one_backward",
    "ooo_pipe1",
    "ooo_pipe2",
    "orders_of",
    "placement_of",
    "simulate_pipeline",
    "synchronised",
    "to_csv",
    "v_shape",
    "validate_pipeline",
    "weight_stashing",
    "zb_h1",
    "zbv",
]
