"""Out-of-order backprop (Oh et al. 2022): weight gradients wait, communication hides behind them."""

from retime.mechanisms.out_of_order.data_parallel import OutOfOrderDataParallel
from retime.mechanisms.out_of_order.report import OutOfOrderReport
from retime.mechanisms.weight_gradients.deferral import WeightGradientDeferral

__all__ = ["OutOfOrderDataParallel", "OutOfOrderReport", "WeightGradientDeferral"]
