"""Made-up data in the shapes of the papers' datasets, labelled as such, for runs without a copy of the real ones.

Every example is computed from the seed and its number alone, so a large dataset costs no memory and the order of access
does not matter. There is something to learn in each, so a loss goes down, but an accuracy on these data says nothing.
Making an ImageNet-sized image takes milliseconds: for time measurements, hold one batch.

Legend: C channels or coefficients, H image height and width, T time steps or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from zlib import crc32

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from retime.recipes.data.audio import INSTRUMENTS, feature_set
from retime.recipes.data.base import ArrayData, Example, check_split


class SyntheticData(Dataset[Example]):
    """``length`` examples, each drawn with a random generator of its own.

    Raises:
        ValueError: unknown split or non-positive ``length``.
    """

    is_synthetic = True

    def __init__(
        self, name: str, length: int, num_classes: int, draw: Callable[[Generator], Example], split: str, seed: int
    ) -> None:
        check_split(split)
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        self.name = f"synthetic-{name}"
        self.length = length
        self.num_classes = num_classes
        self.draw = draw
        self.stream = f"{split} {seed}"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        if not -self.length <= index < self.length:
            raise IndexError(f"{self.name} has {self.length} examples, no number {index}")
        # torch's CPU generator reads the low 32 bits of a seed only, so split, seed and number are mixed into 32 bits.
        return self.draw(Generator().manual_seed(crc32(f"{self.stream} {index % self.length}".encode())))


def class_shifted(shape: tuple[int, ...], offsets: Tensor, generator: Generator) -> Example:
    """Draw a class, and standard normal noise of ``shape`` plus the class's row of ``offsets``."""
    label = torch.randint(len(offsets), (), generator=generator)
    return torch.randn(shape, generator=generator) + offsets[label], label


def sentence(tokens: int, vocab_size: int, generator: Generator) -> Tensor:
    """Draw ids ``(T + 1,)``, int64, of which each is its predecessor plus one or, one time in four, any token."""
    steps = torch.randint(vocab_size, (tokens + 1,), generator=generator)
    steps[1:][torch.rand(tokens, generator=generator) >= 0.25] = 1
    return steps.cumsum(0) % vocab_size


def next_tokens(tokens: int, vocab_size: int, generator: Generator) -> Example:
    """Draw a sentence, and what comes behind each of its tokens."""
    ids = sentence(tokens, vocab_size, generator)
    return ids[:-1], ids[1:]


def translated(tokens: int, vocab_size: int, generator: Generator) -> Example:
    """Draw a source sentence; its translation is the source backwards."""
    source = sentence(tokens, vocab_size, generator)[1:]
    translation = source.flip(0)
    # The decoder reads the translation shifted right behind token 0, which stands for the start of a sentence.
    shifted = torch.cat([translation.new_zeros(1), translation[:-1]])
    return torch.stack([source, shifted]), translation


def class_offsets(classes: int, features: int, seed: int) -> Tensor:
    """One random vector a class, ``(classes, features)``; the same for both splits."""
    return torch.randn(classes, features, generator=Generator().manual_seed(seed))


def synthetic_images(
    split: str = "train",
    num_classes: int = 1000,
    image_size: int = 224,
    channels: int = 3,
    length: int = 10_000,
    seed: int = 0,
) -> SyntheticData:
    """Stand-in for image datasets: ImageNet by default, CIFAR-10 with ``num_classes=10, image_size=32``.

    Inputs float32 ``(C, H, H)``; targets int64 in 0..num_classes-1.

    Raises:
        ValueError: unknown split or non-positive ``length``.
    """
    offsets = class_offsets(num_classes, channels, seed)[:, :, None, None]
    draw = partial(class_shifted, (channels, image_size, image_size), offsets)
    name = f"images-{channels}x{image_size}x{image_size}-{num_classes}-classes"
    return SyntheticData(name, length, num_classes, draw, split, seed)


def synthetic_irmas(split: str = "train", features: str = "S", length: int = 6705, seed: int = 0) -> SyntheticData:
    """Stand-in for `irmas`: inputs float32 ``(T, C)`` of feature set S, M or L; targets int64 in 0..10.

    Unlike in the real features, the mean of a coefficient over the frames is not 0: it tells the classes apart.

    Raises:
        ValueError: unknown split or feature set, or non-positive ``length``.
    """
    shape = feature_set(features).shape
    offsets = class_offsets(len(INSTRUMENTS), shape[1], seed)[:, None, :]
    draw = partial(class_shifted, shape, offsets)
    return SyntheticData(f"irmas-{features}", length, len(INSTRUMENTS), draw, split, seed)


def synthetic_tokens(
    split: str = "train", tokens: int = 128, vocab_size: int = 50257, length: int = 10_000, seed: int = 0
) -> SyntheticData:
    """Stand-in for text: inputs int64 ``(T,)``; targets int64 ``(T,)``, one token further on (3 in 4 can be guessed).

    Raises:
        ValueError: unknown split or non-positive ``length``.
    """
    draw = partial(next_tokens, tokens, vocab_size)
    return SyntheticData(f"tokens-{tokens}", length, vocab_size, draw, split, seed)


def synthetic_translation(
    split: str = "train", tokens: int = 32, vocab_size: int = 37000, length: int = 10_000, seed: int = 0
) -> SyntheticData:
    """Stand-in for WMT English-German, in the form that `retime.recipes.models.transformer_base` takes.

    Inputs int64 ``(2, T)``: a source and its translation shifted right; targets int64 ``(T,)``: the translation, which
    is the source backwards.

    Raises:
        ValueError: unknown split or non-positive ``length``.
    """
    draw = partial(translated, tokens, vocab_size)
    return SyntheticData(f"translation-{tokens}", length, vocab_size, draw, split, seed)


def bitstreams(split: str = "train", steps: int = 1000, length: int = 32_000, seed: int = 0) -> ArrayData:
    """BPPSA's bitstream classification (section 4.1): which of ten Bernoulli probabilities made the bits?

    Inputs float32 ``(T, 1)`` of zeros and ones with T = ``steps``; targets int64 class c in 0..9; a bit is one with
    probability 0.05 + 0.1 c. All bits are held in memory, four bytes each.

    Raises:
        ValueError: unknown split.
    """
    check_split(split)
    generator = Generator().manual_seed(2 * seed + (split == "val"))
    targets = torch.randint(10, (length,), generator=generator)
    probabilities = (0.05 + 0.1 * targets)[:, None, None]
    inputs = (torch.rand(length, steps, 1, generator=generator) < probabilities).float()
    return ArrayData(f"synthetic-bitstreams-{steps}", inputs, targets, num_classes=10, is_synthetic=True)


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
