"""Optimizer fusion (Jiang et al. 2021): updates inside the backward pass, or just before the next forward pass."""

from retime.mechanisms.fusion.backward import BackwardFusion
from retime.mechanisms.fusion.forward import ForwardFusion
from retime.mechanisms.fusion.fuse import fuse_optimizer
from retime.mechanisms.fusion.report import FusionReport
from retime.mechanisms.lazy_updates.per_parameter import declare_per_parameter

__all__ = ["BackwardFusion", "ForwardFusion", "FusionReport", "declare_per_parameter", "fuse_optimizer"]
