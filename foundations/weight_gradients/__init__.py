"""Weight gradients that wait: layers cut out of the autograd graph (Oh et al. 2022, section 3)."""

from retime.foundations.weight_gradients.deferral import WeightGradientDeferral
from retime.foundations.weight_gradients.layer_hooks import SMALL
from retime.foundations.weight_gradients.layers import Block, Layer
from retime.foundations.weight_gradients.split_backward import SplitBackward

__all__ = [
    "Block",
    "Layer",
    "SMALL",
    "SplitBackward",
    "WeightGradientDeferral",
]
