"""The transposed Jacobians of max-pooling and of average pooling, plain or adaptive.

Legend: c channels, P output positions of a plane, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retime.mechanisms.scan.jacobians.layer import LayerJacobian, UnknownJacobian
from retime.mechanisms.scan.jacobians.pattern import CsrPattern
from retime.mechanisms.scan.jacobians.windows import Geometry, Windows, per_dimension

MaxPool = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d
AveragePool = nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d
AdaptiveAveragePool = nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class MaxPoolJacobian(LayerJacobian):
    """Entries at all inputs of each window, one of them 1: the one that torch picks.

    The paper's routine (appendix D.3, algorithms 8 to 10) stores the picked ones only, so that its pattern changes with
    the input. Here the pattern is Table 1's, all that is not a guaranteed zero, and only values change.

    Raises:
        UnknownJacobian: no channel dimension, or the layer returns indices too.
    """

    def __init__(self, layer: MaxPool, input_shape: torch.Size) -> None:
        sizes = _spatial(input_shape, _dimensions(layer))
        if layer.return_indices:
            raise UnknownJacobian("return_indices=True: it has two outputs")
        self._options: dict[str, Any] = {
            name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        }
        count = len(sizes)
        kernel, dilation = (per_dimension(self._options[name], count) for name in ("kernel_size", "dilation"))
        stride, padding = (per_dimension(self._options[name], count) for name in ("stride", "padding"))
        output = _output_sizes(sizes, kernel, stride, padding, dilation, layer.ceil_mode)
        windows = Geometry(sizes, output, kernel, stride, padding, dilation).windows()
        self.pattern, entry = _planes(windows, input_shape)
        self._input_of_plane = windows.place[windows.inside].repeat(input_shape[0])[entry]

    def run(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs, picked = _MAX_POOLS[inputs.dim() - 2](inputs, **self._options, return_indices=True)
        return outputs, (picked, inputs.new_empty(0))

    def values(self, *saved: Tensor) -> Tensor:
        picked, like = saved
        of_entry = picked.flatten(1).t().index_select(0, self.pattern.indices)
        return (of_entry == self._input_of_plane[:, None]).to(like.dtype)

    def move(self, device: torch.device) -> None:
        super().move(device)
        self._input_of_plane = self._input_of_plane.to(device)


class AveragePoolJacobian(LayerJacobian):
    """Entries at all inputs of each window, all of them one over the divisor.

    Raises:
        UnknownJacobian: no channel dimension.
    """

    def __init__(self, layer: AveragePool | AdaptiveAveragePool, input_shape: torch.Size) -> None:
        sizes = _spatial(input_shape, _dimensions(layer))
        if isinstance(layer, AdaptiveAveragePool):
            windows = _adaptive(sizes, layer.output_size)
            divisor = windows.inside.sum(0)
        else:
            count = len(sizes)
            kernel, stride, padding = (
                per_dimension(value, count) for value in (layer.kernel_size, layer.stride, layer.padding)
            )
            ones = (1,) * count
            output = _output_sizes(sizes, kernel, stride, padding, ones, layer.ceil_mode)
            windows = Geometry(sizes, output, kernel, stride, padding, ones).windows()
            divisor = windows.inside.sum(0)
            if layer.count_include_pad:
                # padding counts, what ceil_mode adds beyond it does not
                padded = tuple(size + 2 * pad for size, pad in zip(sizes, padding, strict=True))
                divisor = Geometry(padded, output, kernel, stride, (0,) * count, ones).windows().inside.sum(0)
            override = getattr(layer, "divisor_override", None)
            if override:
                divisor = torch.full_like(divisor, override)
        self.pattern, _ = _planes(windows, input_shape)
        self._weight = (1 / divisor.double())[self.pattern.indices % divisor.numel()][:, None]

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs.new_empty(0),)

    def values(self, *saved: Tensor) -> Tensor:
        (like,) = saved
        return self._weight.to(like.dtype)

    def move(self, device: torch.device) -> None:
        super().move(device)
        self._weight = self._weight.to(device)


def _dimensions(layer: nn.Module) -> int:
    return int(type(layer).__name__.removesuffix("d")[-1])


def _spatial(input_shape: torch.Size, dimensions: int) -> tuple[int, ...]:
    if len(input_shape) != dimensions + 1:
        raise UnknownJacobian(f"input {tuple(input_shape)} a sample, but it takes (channels, {'size, ' * dimensions})")
    return tuple(input_shape[1:])


def _output_sizes(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[int, ...]:
    """Positions along each dimension; with `ceil_mode` a window may hang over, but must start inside or on padding."""
    found = []
    for size, k, s, pad, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        room = size + 2 * pad - d * (k - 1) - 1
        count = (math.ceil(room / s) if ceil_mode else room // s) + 1
        if ceil_mode and (count - 1) * s >= size + pad:
            count -= 1
        found.append(count)
    return tuple(found)


def _planes(windows: Windows, input_shape: torch.Size) -> tuple[CsrPattern, Tensor]:
    """The pattern of the same windows on every channel, and the order of its entries (see `from_coordinates`)."""
    channels, plane = input_shape[0], input_shape[1:].numel()
    positions = windows.inside.shape[1]
    channel = torch.arange(channels)[:, None]
    row_of = (windows.place[windows.inside] + channel * plane).flatten()
    column_of = torch.arange(positions).expand_as(windows.place)[windows.inside] + channel * positions
    return CsrPattern.from_coordinates(channels * plane, channels * positions, row_of, column_of.flatten())


def _adaptive(sizes: Sequence[int], wanted: Any) -> Windows:
    """Windows from floor(i * size / out) to ceil((i + 1) * size / out), exclusive."""
    outputs = (wanted,) * len(sizes) if isinstance(wanted, int) else tuple(wanted)
    inside, place = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    for size, given in zip(sizes, outputs, strict=True):
        out = size if given is None else given
        start = torch.arange(out) * size // out
        stop = -(-(torch.arange(1, out + 1) * size) // out)
        at = start + torch.arange(int((stop - start).max()))[:, None]
        here = at < stop
        inside = (inside[:, None, :, None] & here[None, :, None, :]).flatten(2).flatten(0, 1)
        place = (place[:, None, :, None] * size + at[None, :, None, :]).flatten(2).flatten(0, 1)
    return Windows(inside, place)
