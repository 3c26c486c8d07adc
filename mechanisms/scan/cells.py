"""What a recurrent cell must say about itself, and the cells of torch.nn."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from retime.mechanisms.scan.jacobians import LocalJacobians


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
    """dL/d of the two products that feed the gates."""

    input: Tensor
    """dL/d ``x W_ih^T + b_ih``: ``[T, B, G * H]``."""
    hidden: Tensor
    """dL/d ``h[t-1] W_hh^T + b_hh``: ``[T, B, G * H]``."""


class LocalCell(ABC):
    """One layer's cell at the values of one forward pass."""

    jacobians: LocalJacobians

    @abstractmethod
    def gate_gradients(self, v: Tensor) -> GateGradients:
        """Gradients of the gates' products from those of the states.

        :param v: dL/d state: ``[T, B, S]``.
        """
