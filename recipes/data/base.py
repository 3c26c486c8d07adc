"""What the datasets share: arrays held in memory, normalisation, seeded splits, checks of arguments and paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

Example = tuple[Tensor, Tensor]


class Normalise:
    """Maps uint8 images ``(C, H, W)`` in 0..255 to float32 with the channels' mean and standard deviation taken out."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, image: Tensor) -> Tensor:
        return (image.float() / 255 - self.mean) / self.std


@dataclass(eq=False, repr=False)
class ArrayData(Dataset[Example]):
    """``(input, target)`` pairs held in two tensors with one row an example.

    Attributes:
        name: what a report calls the data; it starts with "synthetic" if they are.
        inputs: ``(n, ...)``; `normalise` is applied to one row at a time, so images can stay uint8 in memory.
        targets: ``(n,)`` class indices, or ``(n, T)`` token ids, int64.
        num_classes: number of classes, or the vocabulary size.
        is_synthetic: whether the data are made up.

    Raises:
        ValueError: inputs and targets differ in length.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    num_classes: int
    is_synthetic: bool = False
    normalise: Normalise | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{self.name}: {len(self.inputs)} inputs but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Example:
        row = self.inputs[index]
        return (row if self.normalise is None else self.normalise(row)), self.targets[index]


def check_split(split: str) -> None:
    """Raise a ValueError unless ``split`` is "train" or "val"."""
    if split not in ("train", "val"):
        raise ValueError(f"split={split!r} is unknown: use 'train' or 'val'")


def shuffled(count: int, seed: int) -> Tensor:
    """Numbers of ``count`` rows ``(count,)`` in a seeded order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def split_rows(count: int, split: str, val_fraction: float, seed: int) -> Tensor:
    """Row numbers ``(m,)`` of one split of ``count`` rows after a seeded shuffle; the two splits are disjoint.

    Raises:
        ValueError: unknown split, or a ``val_fraction`` that leaves one of the splits empty.
    """
    check_split(split)
    val_count = round(count * val_fraction)
    if not 0 < val_count < count:
        raise ValueError(f"val_fraction={val_fraction} of {count} examples leaves the train or the val split empty")
    order = shuffled(count, seed)
    return order[:val_count] if split == "val" else order[val_count:]


def existing_folder(path: str | os.PathLike[str], what: str, stand_in: str) -> Path:
    """``path`` as a Path.

    Raises:
        FileNotFoundError: there is no such folder; the message names what should be there and the synthetic stand-in.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{what}: no folder at {str(folder)!r}. Nothing is downloaded: pass the folder of your own copy, "
            f"or use {stand_in} for data of the same shape"
        )
    return folder
