"""Optimizer fusion (Jiang et al. 2021): updates inside the backward pass, or just before the next forward pass."""

from retime.foundations.lazy_updates import check_bucket_bytes, declare_per_parameter, parameters_of
from retime.mechanisms.fusion.backward import BackwardFusion, FusedParameter, fusion_blockers, refuse_more_gradients
from retime.mechanisms.fusion.data_parallel import DataParallelFusion, ReductionHook, reduction_of
from retime.mechanisms.fusion.forward import ForwardFusion
from retime.mechanisms.fusion.fuse import check_can_fuse_in_backward, fuse_optimizer
from retime.mechanisms.fusion.report import FusionReport, check_mode

__all__ = [
    "BackwardFusion",
    "DataParallelFusion",
    "ForwardFusion",
    "FusedParameter",
    "FusionReport",
    "ReductionHook",
    "check_bucket_bytes",
    "check_can_fuse_in_backward",
    "check_mode",
    "declare_per_parameter",
    "fuse_optimizer",
    "fusion_blockers",
    "parameters_of",
    "reduction_of",
    "refuse_more_gradients",
]
