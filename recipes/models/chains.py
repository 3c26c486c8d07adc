"""Networks that are chains: MLPs, convolutions, LeNet-5, AlexNet and the VGG family, all plain ``nn.Sequential``.

Legend: B batch, C channels, H and W image height and width, N classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from retime.recipes.models.common import choose, initialise, scaled

# Convolutions in each of the five stages (Simonyan & Zisserman 2015, table 1, columns A, B, D and E).
# 101 is moDNN's VGG-101: VGG-19 with more convolutions (Chen et al., section 7). The paper does not say where
# they go; here every stage of VGG-19 (2, 2, 4, 4, 4) grows about six-fold to 98 in all, plus three linear layers.
VGG_STAGES = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
    101: (12, 12, 24, 25, 25),
}
VGG_CHANNELS = (64, 128, 256, 512, 512)


def mlp(
    depth: int = 24, width: int = 1024, in_features: int | None = None, num_classes: int | None = None
) -> nn.Sequential:
    """``depth`` times (Linear + ReLU): this project's benchmark network, all layers alike.

    Input ``(B, in_features)``, by default ``(B, width)``; output ``(B, width)``, or ``(B, num_classes)`` with a last
    linear layer on top if ``num_classes`` is given.

    Raises:
        ValueError: ``depth`` is not positive.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1")
    layers: list[nn.Module] = []
    for index in range(depth):
        features = width if index or in_features is None else in_features
        layers += [nn.Linear(features, width), nn.ReLU()]
    if num_classes is not None:
        layers.append(nn.Linear(width, num_classes))
    return nn.Sequential(*layers)


class ResidualLayer(nn.Module):
    """x + relu(W norm(x)): keeps a deep network of linear layers trainable."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """`(B, width)` to the same shape."""
        return inputs + torch.relu(self.linear(self.norm(inputs)))


def residual_mlp(depth: int = 12, width: int = 1024, in_features: int = 64, num_classes: int = 10) -> nn.Sequential:
    """A linear layer, ``depth`` residual ones and a last one: enough parameters for their updates to cost time.

    Input ``(B, ...)`` with ``in_features`` numbers a sample, output logits ``(B, num_classes)``.
    """
    layers = [ResidualLayer(width) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, width), *layers, nn.Linear(width, num_classes))


def convolutions(depth: int = 12, channels: int = 64) -> nn.Sequential:
    """``depth`` times (3x3 convolution + ReLU) of as many channels in and out: a benchmark network, all layers alike.

    Input and output ``(B, channels, H, W)``.

    Raises:
        ValueError: ``depth`` is not positive.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1")
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def lenet5(num_classes: int = 10, in_channels: int = 1, width: float = 1.0, classic: bool = False) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998) for 32x32 images; BPPSA trains it on CIFAR-10 with ``in_channels=3`` (section 3.5).

    Input ``(B, in_channels, 32, 32)``, output ``(B, N)``. ``classic=True`` takes tanh and average pooling as in 1998,
    otherwise ReLU and max pooling. Each second-stage map sees all first-stage maps (the 1998 table of partial
    connections is left out, as everyone does).
    """
    first, second, third, fourth = (scaled(channels, width, divisor=1) for channels in (6, 16, 120, 84))
    activation = nn.Tanh if classic else nn.ReLU
    pool = partial(nn.AvgPool2d if classic else nn.MaxPool2d, 2)
    return nn.Sequential(
        *(nn.Conv2d(in_channels, first, 5), activation(), pool()),
        *(nn.Conv2d(first, second, 5), activation(), pool()),
        nn.Flatten(),
        *(nn.Linear(second * 5 * 5, third), activation()),
        *(nn.Linear(third, fourth), activation()),
        nn.Linear(fourth, num_classes),
    )


def alexnet(
    num_classes: int = 1000, in_channels: int = 3, width: float = 1.0, dropout: float = 0.5, image_size: int = 224
) -> nn.Sequential:
    """AlexNet in its one-column form (Krizhevsky 2014); no local response normalisation, no grouped convolution.

    Input ``(B, in_channels, H, W)`` with H and W at least 63, output ``(B, N)``. Images below 224 get a smaller linear
    head: one position for every 32 pixels.

    Raises:
        ValueError: ``image_size`` is under 63: the third pooling would see less than its window.
    """
    if image_size < 63:
        raise ValueError(f"image_size={image_size} is too small for AlexNet's strides: use 63 or more")
    a, b, c, d = (scaled(channels, width) for channels in (64, 192, 384, 256))
    hidden = scaled(4096, width)
    grid = min(6, max(1, image_size // 32))
    model = nn.Sequential(
        *(nn.Conv2d(in_channels, a, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(c, d, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(d, d, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        *(nn.AdaptiveAvgPool2d(grid), nn.Flatten()),
        *(nn.Dropout(dropout), nn.Linear(d * grid * grid, hidden), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, num_classes),
    )
    initialise(model)
    return model


def vgg_stages(
    depth: int | Sequence[int], in_channels: int, width: float, batch_norm: bool = False
) -> Iterator[list[nn.Module]]:
    """VGG's five stages, each some times (3x3 convolution, optional batch normalisation, ReLU), then 2x2 pooling.

    ValueError for an unknown depth, or numbers of convolutions that are not five positive ones.
    """
    if isinstance(depth, int):
        choose("depth", depth, VGG_STAGES)
        depth = VGG_STAGES[depth]
    if len(depth) != len(VGG_CHANNELS) or min(depth) < 1:
        raise ValueError(f"depth={tuple(depth)} must give a positive number of convolutions for each of 5 stages")
    for convolutions, channels in zip(depth, VGG_CHANNELS, strict=True):
        layers: list[nn.Module] = []
        for _ in range(convolutions):
            layers.append(nn.Conv2d(in_channels, scaled(channels, width), 3, padding=1))
            in_channels = scaled(channels, width)
            if batch_norm:
                layers.append(nn.BatchNorm2d(in_channels))
            layers.append(nn.ReLU())
        yield [*layers, nn.MaxPool2d(2)]


def vgg(
    depth: int | Sequence[int] = 16,
    batch_norm: bool = False,
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    dropout: float = 0.5,
    hidden: int = 4096,
    image_size: int = 224,
) -> nn.Sequential:
    """VGG-11, -13, -16 (model D), -19 or moDNN's -101 (Simonyan & Zisserman 2015; Chen et al., section 7).

    Input ``(B, in_channels, H, W)`` with H and W at least 32, output ``(B, N)``.

    Args:
        depth: 11, 13, 16, 19, 101, or the number of convolutions in each of the five stages.
        batch_norm: a batch normalisation after every convolution (optimizer-fusion's VGG19_BN).
        num_classes: N.
        in_channels: channels of the images.
        width: multiplies all channels and ``hidden``.
        dropout: probability in the linear head.
        hidden: size of the two hidden linear layers; 0 for a single linear layer, as is usual on CIFAR-10.
        image_size: H and W; below 224 the head gets one position for every 32 pixels in place of 7x7.

    Raises:
        ValueError: unknown ``depth``, or images smaller than 32.
    """
    if image_size < 32:
        raise ValueError(f"image_size={image_size} is too small: VGG halves the image five times, so use 32 or more")
    features = [layer for stage in vgg_stages(depth, in_channels, width, batch_norm) for layer in stage]
    grid = min(7, image_size // 32)
    flat = scaled(VGG_CHANNELS[-1], width) * grid * grid
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(grid), nn.Flatten()]
    if hidden:
        hidden = scaled(hidden, width)
        head += [nn.Linear(flat, hidden), nn.ReLU(), nn.Dropout(dropout)]
        head += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)]
    head.append(nn.Linear(hidden or flat, num_classes))
    model = nn.Sequential(*features, *head)
    initialise(model)
    return model
