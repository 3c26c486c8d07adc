"""DenseNet-BC (Huang et al. 2017): every layer of a block reads the outputs of all layers before it.

Legend: B batch, H and W image height and width, N classes, k growth rate (channels that a layer adds).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retime.recipes.models.common import choose, initialise

# Layers in each of the four dense blocks, and the usual growth rate (Huang et al. 2017, table 1; 161 from their code).
DENSENETS: dict[int, tuple[tuple[int, ...], int]] = {
    121: ((6, 12, 24, 16), 32),
    169: ((6, 12, 32, 32), 32),
    201: ((6, 12, 48, 32), 32),
    161: ((6, 12, 36, 24), 48),
}
BOTTLENECK = 4  # the 1x1 convolution makes 4k channels


class DenseLayer(nn.Module):
    """BN-ReLU-conv1x1-BN-ReLU-conv3x3; its output is appended to its input along the channels."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.BatchNorm2d(in_channels), nn.ReLU(), nn.Conv2d(in_channels, BOTTLENECK * growth, 1, bias=False)),
            *(nn.BatchNorm2d(BOTTLENECK * growth), nn.ReLU()),
            nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, C + k, H, W)``."""
        return torch.cat([features, self.layers(features)], dim=1)


def densenet(
    depth: int = 121,
    growth: int | None = None,
    num_classes: int = 1000,
    in_channels: int = 3,
    small_images: bool = False,
    blocks: tuple[int, ...] | None = None,
) -> nn.Sequential:
    """DenseNet-121, -169, -201 or -161 with bottlenecks and compression 1/2 (Huang et al. 2017).

    Input ``(B, in_channels, H, W)`` with H and W at least 32 (8 with ``small_images``), output ``(B, N)``.

    Args:
        depth: names the four blocks' lengths and the usual growth rate.
        growth: k; ooo-backprop measures 12, 24 and 32 (section 8). A small k is the narrow variant.
        num_classes: N.
        in_channels: channels of the images.
        small_images: 3x3 stem with stride 1 and no pooling, as the authors do on CIFAR.
        blocks: layers in each block in place of ``depth``'s: a short one for a quick test.

    Raises:
        ValueError: unknown ``depth``.
    """
    choose("depth", depth, DENSENETS)
    lengths, usual_growth = DENSENETS[depth]
    lengths = lengths if blocks is None else tuple(blocks)
    growth = usual_growth if growth is None else growth
    channels = 2 * growth
    layers: list[nn.Module]
    if small_images:
        layers = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)]
    else:
        layers = [
            *(nn.Conv2d(in_channels, channels, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(channels)),
            *(nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)),
        ]
    for index, length in enumerate(lengths):
        if index:  # a transition halves the channels and the image between two blocks
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(length):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(channels, num_classes))
    initialise(model)
    return model
