"""Out-of-order backprop (Oh et al. 2022): weight gradients wait, communication hides behind them."""

from retime.mechanisms.out_of_order.data_parallel import ALONE, K, OutOfOrderDataParallel
from retime.mechanisms.out_of_order.kept_k import read_kept_k
from retime.mechanisms.out_of_order.report import OutOfOrderReport
from retime.mechanisms.weight_gradients import WeightGradientDeferral

__all__ = [
    "ALONE",
    "K",
    "OutOfOrderDataParallel",
    "OutOfOrderReport",
    "WeightGradientDeferral",
    "read_kept_k",
]
