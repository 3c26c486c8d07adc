"""Which layer has which transposed Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.arguments import checked
from retime.mechanisms.scan.jacobians.convolution import ConvolutionJacobian
from retime.mechanisms.scan.jacobians.layer import LayerJacobian, UnknownJacobian
from retime.mechanisms.scan.jacobians.matrix import SparseJacobian
from retime.mechanisms.scan.jacobians.pooling import AveragePoolJacobian, MaxPoolJacobian
from retime.mechanisms.scan.jacobians.simple import ElementwiseJacobian, LinearJacobian, ReLUJacobian, ReshapeJacobian

Builder = Callable[[Any, torch.Size], LayerJacobian]

_ELEMENTWISE = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid),
    *(nn.Mish, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh),
    *(nn.Tanhshrink, nn.Threshold, nn.Dropout),
)
_BUILDERS: dict[type[nn.Module], Builder] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvolutionJacobian),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), MaxPoolJacobian),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), AveragePoolJacobian),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), AveragePoolJacobian),
    **dict.fromkeys(_ELEMENTWISE, ElementwiseJacobian),
    **dict.fromkeys((nn.Flatten, nn.Unflatten, nn.Identity), ReshapeJacobian),
    nn.Linear: LinearJacobian,
    nn.ReLU: ReLUJacobian,
}


@checked
def jacobian_of(
    layer: nn.Module, input_shape: tuple[int, ...], device: torch.device | str | None = None
) -> LayerJacobian:
    """The transposed Jacobian of ``layer`` for inputs of ``input_shape`` a sample (no batch dimension).

    Patterns are built here, once; they lie on ``device`` (default: the CPU). Layers are known by their exact type, as
    a subclass may compute something else.

    Raises:
        UnknownJacobian: this layer, or this layer with these settings, has no analytic Jacobian here.
        ValueError: a size below 1.
    """
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in input_shape):
        raise ValueError(f"input_shape={tuple(input_shape)}: give whole numbers of 1 or more")
    builder = _BUILDERS.get(type(layer))
    if builder is None:
        raise UnknownJacobian(f"{type(layer).__name__} has no analytic Jacobian here")
    try:
        found = builder(layer, torch.Size(input_shape))
    except UnknownJacobian as reason:
        raise UnknownJacobian(f"{type(layer).__name__}: {reason}") from None
    if device is not None:
        found.move(torch.device(device))
    return found


@checked
def transposed_jacobian(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, SparseJacobian]:
    """Run ``layer`` on ``inputs`` ``(B, ...)``: its outputs and the transposed Jacobians of all samples.

    Raises:
        UnknownJacobian: as for `jacobian_of`.
    """
    known = jacobian_of(layer, inputs.shape[1:], inputs.device)
    outputs, saved = known.run(layer, inputs)
    return outputs, SparseJacobian(known.pattern, known.values(*saved))
