"""Made-up data of shapes that no data set has: vectors and feature maps for timing."""

import torch

from retime.recipes.data.base import ArrayData


def synthetic_vectors(features: int = 1024, classes: int = 1024, length: int = 256, seed: int = 0) -> ArrayData:
    """Inputs float32 `(features,)`, standard normal; targets int64 in 0..classes-1."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, features, generator=random)
    targets = torch.randint(classes, (length,), generator=random)
    return ArrayData("synthetic-vectors", inputs, targets, classes, is_synthetic=True)


def synthetic_maps(size: int = 28, channels: int = 64, length: int = 32, seed: int = 0) -> ArrayData:
    """Inputs float32 `(channels, size, size)`, standard normal; targets int64 `(size, size)` in 0..channels-1."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, channels, size, size, generator=random)
    targets = torch.randint(channels, (length, size, size), generator=random)
    return ArrayData("synthetic-maps", inputs, targets, channels, is_synthetic=True)
