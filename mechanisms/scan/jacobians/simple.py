"""The transposed Jacobians of linear layers, elementwise functions and reshapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retime.mechanisms.scan.jacobians.convolution import mask_of, same_mask
from retime.mechanisms.scan.jacobians.layer import LayerJacobian, UnknownJacobian
from retime.mechanisms.scan.jacobians.pattern import CsrPattern


class LinearJacobian(LayerJacobian):
    """The transposed weight matrix; weights that are pruned away are no entries. All samples share the values.

    Raises:
        UnknownJacobian: the input of a sample is not one vector of ``in_features`` numbers.
    """

    def __init__(self, layer: nn.Linear, input_shape: torch.Size) -> None:
        if tuple(input_shape) != (layer.in_features,):
            raise UnknownJacobian(f"input {tuple(input_shape)} a sample, but it takes ({layer.in_features},)")
        self.pattern = CsrPattern.full(layer.in_features, layer.out_features)
        self._mask = mask_of(layer)
        self._kept: Tensor | None = None
        if self._mask is not None:
            kept = self._mask.cpu().t().reshape(-1) != 0
            self.pattern, self._kept = self.pattern.only(kept), kept.nonzero()[:, 0]

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(layer.weight, Tensor)
        return (layer.weight.detach(),)

    def values(self, *saved: Tensor) -> Tensor:
        (weight,) = saved
        flat = weight.t().reshape(-1, 1)
        return flat if self._kept is None else flat.index_select(0, self._kept)

    def still_fits(self, layer: nn.Module) -> bool:
        return same_mask(self._mask, mask_of(layer))

    def move(self, device: torch.device) -> None:
        super().move(device)
        if self._kept is not None:
            self._kept = self._kept.to(device)


class ReLUJacobian(LayerJacobian):
    """A diagonal of ones where the input is positive (appendix D.2, algorithms 5 to 7); NaN passes as in autograd."""

    def __init__(self, layer: nn.Module, input_shape: torch.Size) -> None:
        self.pattern = CsrPattern.diagonal(input_shape.numel())

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs,)

    def values(self, *saved: Tensor) -> Tensor:
        (inputs,) = saved
        return (~(inputs.flatten(1) <= 0)).t().to(inputs.dtype)


class ElementwiseJacobian(LayerJacobian):
    """A diagonal: the derivative of any function of single elements, by autograd's own formula in one call.

    Args:
        layer: computes every output from the input at the same place (dropout too: its mask is that of the run).
        input_shape: of one sample.

    Raises:
        UnknownJacobian: the layer works in place, so that autograd cannot be asked.
    """

    def __init__(self, layer: nn.Module, input_shape: torch.Size) -> None:
        if getattr(layer, "inplace", False):
            raise UnknownJacobian("inplace=True: set inplace=False")
        self.pattern = CsrPattern.diagonal(input_shape.numel())

    def run(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.enable_grad():
            leaf = inputs.detach().requires_grad_()
            outputs = layer(leaf)
            (derivative,) = torch.autograd.grad(outputs, leaf, torch.ones_like(outputs))
        return outputs.detach(), (derivative,)

    def values(self, *saved: Tensor) -> Tensor:
        (derivative,) = saved
        return derivative.flatten(1).t()


class ReshapeJacobian(LayerJacobian):
    """The identity: flatten and unflatten of one sample's dimensions move nothing in row-major order.

    Raises:
        UnknownJacobian: the batch dimension takes part.
    """

    is_identity = True

    def __init__(self, layer: nn.Module, input_shape: torch.Size) -> None:
        dimension = layer.start_dim if isinstance(layer, nn.Flatten) else getattr(layer, "dim", 1)
        if isinstance(layer, nn.Flatten | nn.Unflatten) and (not isinstance(dimension, int) or dimension < 1):
            raise UnknownJacobian(f"it reshapes from dimension {dimension}: use 1 or more, 0 is the batch")
        self.pattern = CsrPattern.diagonal(input_shape.numel())

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs.new_ones(()),)

    def values(self, *saved: Tensor) -> Tensor:
        (one,) = saved
        return one.expand(self.pattern.entries, 1)
