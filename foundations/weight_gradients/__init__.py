"""Weight gradients that wait: layers cut out of the autograd graph (Oh et al. 2022, section 3)."""

from retime.foundations.weight_gradients.cut import Block, Layer
from retime.foundations.weight_gradients.passes import SMALL
from retime.foundations.weight_gradients.split_backward import SplitBackward, WeightGradientDeferral

__all__ = [
    "Block",
    "Layer",
    "SMALL",
    "SplitBackward",
    "WeightGradientDeferral",
]
