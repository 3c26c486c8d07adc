"""Out-of-order backprop (Oh et al. 2022): weight gradients wait, communication hides behind them."""

from retime.foundations.weight_gradients import WeightGradientDeferral
from retime.mechanisms.out_of_order.data_parallel import ALONE, OutOfOrderDataParallel, OutOfOrderReport
from retime.mechanisms.out_of_order.k_search import K, SavedK, read_saved_k

__all__ = [
    "ALONE",
    "K",
    "OutOfOrderDataParallel",
    "OutOfOrderReport",
    "SavedK",
    "WeightGradientDeferral",
    "read_saved_k",
]
