"""Pipeline parallel training: which stage on which rank, and in which order (Oh et al. 2022, section 5.2)."""

from retime.schedules.pipeline.list_scheduler import Cap, Rule, least_cap, list_schedule
from retime.schedules.pipeline.ooo_pipe import (
    FLUSH,
    GREEDY,
    fast_forwarded,
    fastest_list_schedule,
    joined_gradients,
    ooo_pipe1,
    ooo_pipe2,
    synchronised,
)
from retime.schedules.pipeline.orders import (
    WeightStashing,
    cross_layer,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    one_forward_one_backward,
    weight_stashing,
    zb_h1,
    zbv,
)
from retime.schedules.pipeline.placement import Placement, block, even_stages, lane_name, modulo, v_shape
from retime.schedules.pipeline.simulation import (
    Hops,
    PipelineTimeline,
    StageCosts,
    simulate_pipeline,
    validate_pipeline,
)
from retime.schedules.pipeline.torch_csv import from_csv, orders_of, placement_of, to_csv

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
