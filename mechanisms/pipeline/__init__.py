"""Pipeline parallel training of ordinary modules, with gradient fast-forwarding and modulo allocation."""

from retime.foundations.ddp import RankLostError
from retime.mechanisms.pipeline.checks import (
    PipelineError,
    broadcast_state,
    check_optimizer,
    messages_of_group,
    warn_of_parts,
)
from retime.mechanisms.pipeline.layers import find_layers
from retime.mechanisms.pipeline.losses import Examples, FirstLook, LossWeight, LossWeights, needed_loss
from retime.mechanisms.pipeline.meta_device import DeferredInitModel, is_on_meta, load_into_meta
from retime.mechanisms.pipeline.ownership import (
    Ownership,
    Size,
    forget_absent,
    make_groups,
    refuse_part_of_model,
    sizes_of,
    whole_model_state,
    whole_optimizer_state,
)
from retime.mechanisms.pipeline.plan import SCHEDULES, Costs, Planner, check_schedule
from retime.mechanisms.pipeline.running import whole_loss
from retime.mechanisms.pipeline.step import PipelineReport, PipelineStep

__all__ = [
    "Costs",
    "Examples",
    "FirstLook",
    "DeferredInitModel",
    "LossWeight",
    "LossWeights",
    "Ownership",
    "PipelineError",
    "PipelineReport",
    "PipelineStep",
    "Planner",
    "RankLostError",
    "SCHEDULES",
    "Size",
    "broadcast_state",
    "check_optimizer",
    "check_schedule",
    "find_layers",
    "forget_absent",
    "is_on_meta",
    "load_into_meta",
    "make_groups",
    "messages_of_group",
    "needed_loss",
    "refuse_part_of_model",
    "sizes_of",
    "warn_of_parts",
    "whole_loss",
    "whole_model_state",
    "whole_optimizer_state",
]
