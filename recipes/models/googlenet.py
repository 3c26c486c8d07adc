"""GoogLeNet (Inception v1, Szegedy et al. 2015) without its auxiliary classifiers.

Legend: B batch, C channels, H and W image height and width, N classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from retime.recipes.models.common import choose, initialise, scaled

# The paper's table 1: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, projection after pooling; None is a max pooling.
INCEPTIONS: tuple[tuple[int, int, int, int, int, int] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)

Unit = Callable[..., list[nn.Module]]


def make_unit(batch_norm: bool, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Convolution, normalisation if it has any, and ReLU."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=not batch_norm)
    norm = [nn.BatchNorm2d(out_channels, eps=1e-3)] if batch_norm else []
    return [convolution, *norm, nn.ReLU()]


class Inception(nn.Module):
    """Four branches side by side, joined along the channels: 1x1, 3x3, 5x5 (or 3x3), and pooling."""

    def __init__(self, unit: Unit, in_channels: int, sizes: tuple[int, ...], kernel: int) -> None:
        super().__init__()
        one, three_reduce, three, five_reduce, five, pool = sizes
        self.branches = nn.ModuleList(
            [
                nn.Sequential(*unit(in_channels, one, 1)),
                nn.Sequential(*unit(in_channels, three_reduce, 1), *unit(three_reduce, three, 3)),
                nn.Sequential(*unit(in_channels, five_reduce, 1), *unit(five_reduce, five, kernel)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), *unit(in_channels, pool, 1)),
            ]
        )
        self.out_channels = one + three + five + pool

    def forward(self, features: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, out_channels, H, W)``."""
        return torch.cat([branch(features) for branch in self.branches], dim=1)


def googlenet(
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    dropout: float = 0.2,
    batch_norm: bool = True,
    kernel: int = 3,
) -> nn.Sequential:
    """GoogLeNet v1, the auxiliary classifiers off; cpu-accumulation's second network (table 2).

    Input ``(B, in_channels, H, W)`` with H and W at least 32, output ``(B, N)``. Local response normalisation is left
    out. The defaults are the form that is in use today: batch normalisation, and 3x3 where the paper has 5x5 (the form
    that published weights have). ``batch_norm=False, kernel=5, dropout=0.4`` is the paper's.

    Raises:
        ValueError: ``kernel`` is neither 3 nor 5.
    """
    choose("kernel", kernel, (3, 5))
    unit = partial(make_unit, batch_norm)
    stem, channels = scaled(64, width), scaled(192, width)
    layers: list[nn.Module] = [
        *(*unit(in_channels, stem, 7, 2), nn.MaxPool2d(3, stride=2, ceil_mode=True)),
        *(*unit(stem, stem, 1), *unit(stem, channels, 3), nn.MaxPool2d(3, stride=2, ceil_mode=True)),
    ]
    for sizes in INCEPTIONS:
        if sizes is None:
            layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
            continue
        inception = Inception(unit, channels, tuple(scaled(size, width) for size in sizes), kernel)
        layers.append(inception)
        channels = inception.out_channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, num_classes)]
    model = nn.Sequential(*layers)
    initialise(model)
    return model
