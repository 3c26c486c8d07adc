"""A backward pass that fails in the middle."""

from typing import Any

import torch
from torch import Tensor


class FailsBackward(torch.autograd.Function):
    """Gives its input on, and fails when a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in the middle of the backward pass")
