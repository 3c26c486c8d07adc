"""Weight gradients that wait: layers cut out of the autograd graph (Oh et al. 2022, section 3)."""

from retime.mechanisms.weight_gradients.deferral import WeightGradientDeferral
from retime.mechanisms.weight_gradients.layer_hooks import SMALL
from retime.mechanisms.weight_gradients.layers import Block, Layer
from retime.mechanisms.weight_gradients.split_backward import SplitBackward

__all__ = [
    "SMALL",
    "Block",
    "Layer",
    "SplitBackward",
    "WeightGradientDeferral",
]
