"""Which inputs the windows of a convolution or pooling cover, in any number of dimensions.

Legend: N spatial dimensions, P output positions of one plane, T places (taps) of one window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Sliding windows over one plane.

    Attributes:
        inside: bool ``(T, P)``, whether a tap of a window lies on the plane and not on its padding.
        place: int64 ``(T, P)``, the flat index on the plane; any number where ``inside`` is false.
    """

    inside: Tensor
    place: Tensor


@dataclass(frozen=True)
class Geometry:
    """Sizes along each of the N dimensions; `padding` is what lies before the first element."""

    sizes: tuple[int, ...]
    output_sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def windows(self) -> Windows:
        """All windows, taps and positions both in row-major order."""
        dimensions = len(self.sizes)
        inside, place = torch.ones((), dtype=torch.bool), torch.zeros((), dtype=torch.long)
        for index in range(dimensions):
            tap = torch.arange(self.kernel[index])[:, None] * self.dilation[index]
            at = torch.arange(self.output_sizes[index]) * self.stride[index] - self.padding[index] + tap
            shape = [1] * (2 * dimensions)
            shape[index], shape[dimensions + index] = at.shape
            at = at.view(shape)
            inside = inside & (at >= 0) & (at < self.sizes[index])
            place = place * self.sizes[index] + at
        taps = inside.shape[:dimensions].numel()
        return Windows(inside.reshape(taps, -1), place.reshape(taps, -1))


def per_dimension(value: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    """A layer's setting as one number a dimension: 3 becomes ``(3, 3)``.

    Raises:
        ValueError: neither one number nor one a dimension.
    """
    values = (value,) * dimensions if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= dimensions
    if len(values) != dimensions:
        raise ValueError(f"{value} must be one number or {dimensions} of them")
    return values
