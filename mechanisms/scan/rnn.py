"""The Elman cell: ``h[t] = f(x[t] W_ih^T + b_ih + h[t-1] W_hh^T + b_hh)``, ``f`` tanh or ReLU (paper, Equation 9)."""

from torch import Tensor

from retime.mechanisms.scan.blocks import BlockJacobians
from retime.mechanisms.scan.cells import GateGradients, LocalCell, Weights


class LocalRNN(LocalCell):
    """Both derivatives follow from the output alone: nothing is recomputed.

    Args:
        output: ``[T, B, H]``.
        mask: ``[T, B, 1]``, zero where a shorter sequence has ended. None: all have the same length.
    """

    def __init__(self, mode: str, output: Tensor, weights: Weights, mask: Tensor | None = None) -> None:
        slope = 1 - output * output if mode == "RNN_TANH" else (output > 0).to(output.dtype)
        self.slope = slope if mask is None else slope * mask
        self.jacobians = BlockJacobians(self.slope.unsqueeze(-2), weights.hidden)

    def gate_gradients(self, v: Tensor) -> GateGradients:
        gradient = self.slope * v
        return GateGradients((gradient,), (gradient,))
