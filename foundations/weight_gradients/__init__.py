"""Weight gradients that wait: layers cut out of the autograd graph (Oh et al. 2022, section 3)."""

from retime.foundations.weight_gradients.cut import Block
from retime.foundations.weight_gradients.split_backward import SMALL, SplitBackward, WeightGradientDeferral

__all__ = ["Block", "SMALL", "SplitBackward", "WeightGradientDeferral"]
