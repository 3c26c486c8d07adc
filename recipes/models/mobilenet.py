"""MobileNetV3 large and small (Howard et al. 2019), after the paper's tables 1 and 2.

Legend: B batch, C channels, H and W image height and width, N classes.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from retime.recipes.models.common import choose, initialise, scaled

# The paper's TensorFlow settings, in torch's terms: decay 0.99 is momentum 0.01.
Norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)


class Block(NamedTuple):
    """One row of the paper's tables: kernel, expanded and output channels, squeeze-and-excite, hard swish, stride."""

    kernel: int
    expanded: int
    out: int
    squeeze: bool
    swish: bool
    stride: int


LARGE = (
    Block(3, 16, 16, False, False, 1),
    Block(3, 64, 24, False, False, 2),
    Block(3, 72, 24, False, False, 1),
    Block(5, 72, 40, True, False, 2),
    Block(5, 120, 40, True, False, 1),
    Block(5, 120, 40, True, False, 1),
    Block(3, 240, 80, False, True, 2),
    Block(3, 200, 80, False, True, 1),
    Block(3, 184, 80, False, True, 1),
    Block(3, 184, 80, False, True, 1),
    Block(3, 480, 112, True, True, 1),
    Block(3, 672, 112, True, True, 1),
    Block(5, 672, 160, True, True, 2),
    Block(5, 960, 160, True, True, 1),
    Block(5, 960, 160, True, True, 1),
)
SMALL = (
    Block(3, 16, 16, True, False, 2),
    Block(3, 72, 24, False, False, 2),
    Block(3, 88, 24, False, False, 1),
    Block(5, 96, 40, True, True, 2),
    Block(5, 240, 40, True, True, 1),
    Block(5, 240, 40, True, True, 1),
    Block(5, 120, 48, True, True, 1),
    Block(5, 144, 48, True, True, 1),
    Block(5, 288, 96, True, True, 2),
    Block(5, 576, 96, True, True, 1),
    Block(5, 576, 96, True, True, 1),
)
VARIANTS = {"large": (LARGE, 1280), "small": (SMALL, 1024)}  # blocks, and the size of the hidden linear layer


def unit(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1, activation: bool | None = None
) -> list[nn.Module]:
    """Convolution and batch normalisation, then hard swish (``activation=True``), ReLU (False) or nothing (None)."""
    convolution = nn.Conv2d(
        in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
    )
    layers: list[nn.Module] = [convolution, Norm(out_channels)]
    if activation is not None:
        layers.append(nn.Hardswish() if activation else nn.ReLU())
    return layers


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate that is computed from all channels' means (Hu et al. 2018), ratio 1/4."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = scaled(channels, 0.25)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            *(nn.Conv2d(channels, squeezed, 1), nn.ReLU()),
            *(nn.Conv2d(squeezed, channels, 1), nn.Hardsigmoid()),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``(B, C, H, W)`` to the same shape."""
        gated: Tensor = features * self.gate(features)
        return gated


class InvertedResidual(nn.Module):
    """Expand (1x1), filter each channel (depthwise), optionally gate, project (1x1), and add the input if it fits."""

    def __init__(self, in_channels: int, block: Block) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if block.expanded != in_channels:
            layers += unit(in_channels, block.expanded, 1, activation=block.swish)
        layers += unit(block.expanded, block.expanded, block.kernel, block.stride, block.expanded, block.swish)
        if block.squeeze:
            layers.append(SqueezeExcite(block.expanded))
        layers += unit(block.expanded, block.out, 1)
        self.layers = nn.Sequential(*layers)
        self.adds_input = block.stride == 1 and block.out == in_channels

    def forward(self, features: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, out, H / stride, W / stride)``."""
        output: Tensor = self.layers(features)
        return features + output if self.adds_input else output


def mobilenet_v3(
    variant: str = "large", num_classes: int = 1000, in_channels: int = 3, width: float = 1.0, dropout: float = 0.2
) -> nn.Sequential:
    """MobileNetV3 large or small (Howard et al. 2019); ooo-backprop measures large (table 1).

    Input ``(B, in_channels, H, W)``, output ``(B, N)``. ``width`` is the multiplier alpha: ooo-backprop takes 0.25,
    0.5, 0.75 and 1. The hidden linear layer keeps its size.

    Raises:
        ValueError: unknown ``variant``.
    """
    choose("variant", variant, VARIANTS)
    blocks, hidden = VARIANTS[variant]
    channels = scaled(16, width)
    layers = unit(in_channels, channels, 3, stride=2, activation=True)
    for block in blocks:
        block = block._replace(expanded=scaled(block.expanded, width), out=scaled(block.out, width))
        layers.append(InvertedResidual(channels, block))
        channels = block.out
    last = 6 * channels
    layers += unit(channels, last, 1, activation=True)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, hidden), nn.Hardswish(), nn.Dropout(dropout)]
    model = nn.Sequential(*layers, nn.Linear(hidden, num_classes))
    initialise(model)
    return model
