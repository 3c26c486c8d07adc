"""What a recurrent cell must say about itself, and the cells of torch.nn."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from retime.mechanisms.scan.local_jacobians import LocalJacobians


class Weights(NamedTuple):
    """One layer and direction. ``G`` is 1 (RNN), 3 (GRU) or 4 (LSTM); gates in torch.nn's order."""

    input: Tensor
    """``weight_ih``: ``[G * H, I]``."""
    hidden: Tensor
    """``weight_hh``: ``[G * H, H]``."""
    input_bias: Tensor | None
    """``bias_ih``: ``[G * H]``."""
    hidden_bias: Tensor | None
    """``bias_hh``: ``[G * H]``."""


class GateGradients(NamedTuple):
    """dL/d of the two products that feed the gates, a tensor ``[T, B, H]`` a gate."""

    input: tuple[Tensor, ...]
    """dL/d ``x W_ih^T + b_ih``."""
    hidden: tuple[Tensor, ...]
    """dL/d ``h[t-1] W_hh^T + b_hh``."""


def gate_products(series: Tensor, weight: Tensor, bias: Tensor | None, gates: int) -> tuple[Tensor, ...]:
    """``series @ weight.T + bias``, one contiguous ``[T, B, H]`` a gate, which suits elementwise work.

    Args:
        series: ``[T, B, F]``.
        weight: ``[G * H, F]``.
        bias: ``[G * H]``.
    """
    rows = series.flatten(0, 1).expand(gates, -1, -1)
    matrices = weight.reshape(gates, -1, weight.shape[1]).transpose(1, 2)
    add = None if bias is None else bias.reshape(gates, 1, -1)
    products = torch.bmm(rows, matrices) if add is None else torch.baddbmm(add, rows, matrices)
    return products.view(gates, *series.shape[:2], -1).unbind(0)


class LocalCell(ABC):
    """One layer's cell at the values of one forward pass."""

    jacobians: LocalJacobians

    @abstractmethod
    def gate_gradients(self, v: Tensor) -> GateGradients:
        """Gradients of the gates' products from those of the states.

        Args:
            v: dL/d state: ``[T, B, S]``.
        """
