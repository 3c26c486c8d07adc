"""Pipeline parallel training of ordinary modules, with gradient fast-forwarding and modulo allocation."""

from retime.mechanisms.pipeline.check_optimizer import check_optimizer
from retime.mechanisms.pipeline.checkpoint import forget_absent, whole_model_state, whole_optimizer_state
from retime.mechanisms.pipeline.errors import PipelineError, RankLostError, messages_of_group
from retime.mechanisms.pipeline.find_layers import find_layers
from retime.mechanisms.pipeline.groups import Size, make_groups, sizes_of
from retime.mechanisms.pipeline.hollow import HollowModel, is_on_meta, load_into_meta
from retime.mechanisms.pipeline.loss_head import NotUnderstoodError
from retime.mechanisms.pipeline.losses import (
    Examples,
    FirstLook,
    LossWeight,
    LossWeights,
    check_loss_weight,
    needed_loss,
)
from retime.mechanisms.pipeline.ownership import Ownership, refuse_part_of_model
from retime.mechanisms.pipeline.pipeline_step import PipelineStep
from retime.mechanisms.pipeline.plan import SCHEDULES, Costs, Planner, check_schedule
from retime.mechanisms.pipeline.report import PipelineReport
from retime.mechanisms.pipeline.running_step import MicroBatchResult, whole_loss
from retime.mechanisms.pipeline.warn_of_parts import warn_of_parts

__all__ = [
    "Costs",
    "Examples",
    "FirstLook",
    "HollowModel",
    "LossWeight",
    "LossWeights",
    "MicroBatchResult",
    "NotUnderstoodError",
    "Ownership",
    "PipelineError",
    "PipelineReport",
    "PipelineStep",
    "Planner",
    "RankLostError",
    "SCHEDULES",
    "Size",
    "check_loss_weight",
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
