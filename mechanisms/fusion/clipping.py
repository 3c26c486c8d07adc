"""Clipping by value, gradient by gradient."""

import torch
from torch import Tensor

from retime.foundations.torch_private import foreach_clamp_max, foreach_clamp_min


def clip_by_value(gradients: list[Tensor], clip_value: float) -> None:
    """Clamp in place, with the kernels that ``torch.nn.utils.clip_grad_value_`` uses on parameters."""
    if not gradients:
        return
    with torch.no_grad():
        foreach_clamp_min(gradients, -clip_value)
        foreach_clamp_max(gradients, clip_value)
