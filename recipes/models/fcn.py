"""Fully convolutional network for segmentation on a VGG-16 trunk: FCN-32s, FCN-16s, FCN-8s (Long et al. 2015).

Legend: B batch, H and W image height and width, N classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retime.recipes.models.chains import VGG_CHANNELS, vgg_stages
from retime.recipes.models.common import choose, initialise, scaled


def bilinear_upsampling(channels: int, factor: int) -> nn.ConvTranspose2d:
    """A learned upsampling ``(B, channels, H, W) -> (B, channels, factor*H, factor*W)`` that starts as bilinear.

    ``factor`` must be even: the window is ``2 * factor`` and half of ``factor`` is cut off on each side.
    """
    layer = nn.ConvTranspose2d(channels, channels, 2 * factor, stride=factor, padding=factor // 2, bias=False)
    ramp = 1 - (torch.arange(2 * factor) - factor + 0.5).abs() / factor
    with torch.no_grad():
        # Class c of the output starts as the interpolation of class c of the input; the other pairs start at zero.
        layer.weight.copy_(torch.eye(channels)[:, :, None, None] * (ramp[:, None] * ramp[None, :]))
    return layer


class FullyConvolutionalNetwork(nn.Module):
    """VGG-16's convolutions, its two linear layers as convolutions, a 1x1 score, then upsampling with skips."""

    def __init__(self, variant: str, num_classes: int, in_channels: int, width: float, dropout: float) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*stage) for stage in vgg_stages(16, in_channels, width))
        channels, hidden = scaled(VGG_CHANNELS[-1], width), scaled(4096, width)
        self.head = nn.Sequential(
            *(nn.Conv2d(channels, hidden, 7, padding=3), nn.ReLU(), nn.Dropout2d(dropout)),
            *(nn.Conv2d(hidden, hidden, 1), nn.ReLU(), nn.Dropout2d(dropout)),
        )
        initialise(self)
        # Scores: of the head (at 1/32), of stage 4 (at 1/16) and of stage 3 (at 1/8), as many as the variant merges.
        self.merged = merged = {"32s": [], "16s": [3], "8s": [3, 2]}[variant]
        sizes = [hidden, *(scaled(VGG_CHANNELS[stage], width) for stage in merged)]
        self.scores = nn.ModuleList(nn.Conv2d(size, num_classes, 1) for size in sizes)
        factors = [*(2 for _ in merged), 32 >> len(merged)]
        self.upsamplings = nn.ModuleList(bilinear_upsampling(num_classes, factor) for factor in factors)

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(B, C, H, W)`` to one score a class and pixel ``(B, N, H, W)``.

        Raises:
            ValueError: H or W is no multiple of 32.
        """
        height, width = images.shape[-2:]
        if height % 32 or width % 32:
            raise ValueError(f"images of {height}x{width} do not fit: pad height and width to multiples of 32")
        outputs: list[Tensor] = []
        features = images
        for stage in self.stages:
            features = stage(features)
            outputs.append(features)
        score: Tensor = self.upsamplings[0](self.scores[0](self.head(features)))
        for index, stage_index in enumerate(self.merged, start=1):
            score = self.upsamplings[index](score + self.scores[index](outputs[stage_index]))
        return score


def fcn(
    variant: str = "8s", num_classes: int = 21, in_channels: int = 3, width: float = 1.0, dropout: float = 0.5
) -> FullyConvolutionalNetwork:
    """FCN-8s, -16s or -32s on VGG-16 (Long et al. 2015), the segmentation network of moDNN's section 7.

    Input ``(B, in_channels, H, W)`` with H and W multiples of 32, output logits ``(B, N, H, W)``: use
    ``cross_entropy(logits, labels)`` with labels ``(B, H, W)``.

    Deviates from the paper's Caffe network in padding only: it pads the image by 100 pixels and crops the scores; here
    every convolution keeps its size, which gives the same parameters. moDNN does not say which variant it ran.

    Raises:
        ValueError: unknown ``variant``.
    """
    choose("variant", variant, ("8s", "16s", "32s"))
    return FullyConvolutionalNetwork(variant, num_classes, in_channels, width, dropout)
