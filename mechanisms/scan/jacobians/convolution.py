"""The transposed Jacobian of a convolution of any size, stride, padding, dilation and groups.

Wang et al. 2020, appendix D.1 (algorithms 2 to 4), gives it for 3x3 filters with padding 1. There, `indptr` counts six
entries a row and output channel at the top and bottom edge and leaves explicit zeros at the left and right one; here
those places are no entries, which is what Table 1's 0.99157 counts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retime.mechanisms.scan.jacobians.layer import LayerJacobian, UnknownJacobian
from retime.mechanisms.scan.jacobians.pattern import CsrPattern
from retime.mechanisms.scan.jacobians.windows import Geometry, per_dimension

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvolutionJacobian(LayerJacobian):
    """Entry (input c, y; output o, x) holds ``weight[o, c, tap]`` for the tap of window x that lies on y.

    The values depend on the weights alone, so all samples share them, and a weight that is pruned away
    (`torch.nn.utils.prune`) is no entry.

    Args:
        layer: a plain ``nn.Conv1d``, ``Conv2d`` or ``Conv3d``.
        input_shape: ``(channels, *sizes)`` of one sample.

    Raises:
        UnknownJacobian: no channel dimension, another number of channels, or padding with something else than zeros.
    """

    def __init__(self, layer: Convolution, input_shape: torch.Size) -> None:
        dimensions = len(layer.kernel_size)
        if len(input_shape) != dimensions + 1 or input_shape[0] != layer.in_channels:
            raise UnknownJacobian(
                f"input {tuple(input_shape)} a sample, but it takes ({layer.in_channels}, {'size, ' * dimensions})"
            )
        if layer.padding_mode != "zeros":
            raise UnknownJacobian(f"padding_mode={layer.padding_mode!r}: only 'zeros' is known")
        geometry = geometry_of(layer, input_shape[1:])
        windows = geometry.windows()
        self._mask = mask_of(layer)
        kept = torch.ones(layer.weight.shape, dtype=torch.bool) if self._mask is None else self._mask.cpu() != 0
        # one line a weight: output channel, input channel of the group, tap
        out_channel, in_channel, tap = kept.flatten(2).nonzero().unbind(1)
        in_channel = in_channel + out_channel // (layer.out_channels // layer.groups) * kept.shape[1]
        inside = windows.inside[tap]
        plane, positions = input_shape[1:].numel(), windows.inside.shape[1]
        row_of = (windows.place[tap] + in_channel[:, None] * plane)[inside]
        column_of = (torch.arange(positions) + out_channel[:, None] * positions)[inside]
        weight_of = kept.flatten().nonzero().expand(-1, positions)[inside]
        rows, columns = input_shape.numel(), layer.out_channels * positions
        self.pattern, order = CsrPattern.from_coordinates(rows, columns, row_of, column_of)
        self._weight_of = weight_of[order]

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(layer.weight, Tensor)
        return (layer.weight.detach(),)

    def values(self, *saved: Tensor) -> Tensor:
        (weight,) = saved
        return weight.reshape(-1).index_select(0, self._weight_of)[:, None]

    def still_fits(self, layer: nn.Module) -> bool:
        return same_mask(self._mask, mask_of(layer))

    def move(self, device: torch.device) -> None:
        super().move(device)
        self._weight_of = self._weight_of.to(device)


def geometry_of(layer: Convolution, sizes: torch.Size) -> Geometry:
    """The windows' geometry over an input of these spatial sizes."""
    count = len(sizes)
    kernel, dilation = per_dimension(layer.kernel_size, count), per_dimension(layer.dilation, count)
    stride = per_dimension(layer.stride, count)
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before, both = tuple(t // 2 for t in total), total
    else:
        before = (0,) * count if isinstance(layer.padding, str) else per_dimension(layer.padding, count)
        both = [2 * p for p in before]
    output = tuple(
        (size + pad - d * (k - 1) - 1) // s + 1
        for size, pad, d, k, s in zip(sizes, both, dilation, kernel, stride, strict=True)
    )
    return Geometry(tuple(sizes), output, kernel, stride, before, dilation)


def mask_of(layer: nn.Module) -> Tensor | None:
    """The mask by which `torch.nn.utils.prune` prunes ``layer.weight``, or None."""
    mask = getattr(layer, "weight_mask", None)
    return mask.detach().clone() if isinstance(mask, Tensor) else None


def same_mask(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both prune the same weights."""
    if one is None or other is None:
        return one is other
    return one.device == other.device and torch.equal(one, other)
