"""U-Net (Ronneberger et al. 2015), with padding that keeps sizes and batch normalisation.

Legend: B batch, C channels, H and W image height and width, N classes.
"""

import torch
from torch import Tensor, nn

from retime.recipes.models.common import scaled


def _twice(channels_in: int, channels: int) -> nn.Sequential:
    """Two 3x3 convolutions, each normalised and rectified."""
    layers: list[nn.Module] = []
    for given in (channels_in, channels):
        layers += [nn.Conv2d(given, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Logits `(B, N, H, W)` from images `(B, C, H, W)`; see :func:`unet`."""

    def __init__(self, widths: list[int], num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            _twice(before, after) for before, after in zip([in_channels, *widths], widths, strict=False)
        )
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(deep, shallow, 2, stride=2) for deep, shallow in pairs)
        self.up = nn.ModuleList(_twice(2 * shallow, shallow) for _, shallow in pairs)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept, features = [], images
        for number, stage in enumerate(self.down):
            features = stage(self.pool(features) if number else features)
            kept.append(features)
        for enlarge, stage, beside in zip(self.enlarge, self.up, kept[-2::-1], strict=True):
            features = stage(torch.cat([beside, enlarge(features)], dim=1))
        logits: Tensor = self.head(features)
        return logits


def unet(num_classes: int = 2, in_channels: int = 1, depth: int = 4, width: float = 1.0) -> UNet:
    """U-Net with `depth` levels below the first, of 64, 128, 256, ... channels times `width`.

    Input `(B, in_channels, H, W)` with H and W multiples of `2 ** depth`, output `(B, num_classes, H, W)`.

    Deviates from the paper's network, which has no padding and crops, so that its output is smaller than its input.

    Raises:
        ValueError: `depth` is not positive.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1")
    return UNet([scaled(64 * 2**level, width) for level in range(depth + 1)], num_classes, in_channels)
