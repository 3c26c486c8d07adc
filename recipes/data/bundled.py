"""Real data that every installation already has: scikit-learn's digits and Python's own source code.

Legend: H image height and width, C channels, T tokens of a window.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import interpolate

from retime.recipes.data.base import ArrayData, check_split, split_rows


def digits(
    split: str = "train", image_size: int = 8, channels: int = 1, val_fraction: float = 0.2, seed: int = 0
) -> ArrayData:
    """The 1797 handwritten digits bundled with scikit-learn (UCI optical recognition of handwritten digits).

    Inputs float32 ``(C, H, H)``, mean 0 and variance 1 over all pixels of the data; targets int64 in 0..9. Larger
    ``image_size`` (the original is 8) interpolates, ``channels`` repeats the grey channel, so that any image network
    can train on them.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: unknown split or unusable ``val_fraction``.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits come with scikit-learn: pip install 'lightning-retime[recipes]'") from error
    bundle = load_digits()
    images = torch.from_numpy(bundle.images).float()[:, None]
    images = (images - images.mean()) / images.std()
    rows = split_rows(len(images), split, val_fraction, seed)
    images = images[rows]
    if image_size != images.shape[-1]:
        images = interpolate(images, size=(image_size, image_size), mode="bilinear", align_corners=False)
    images = images.expand(-1, channels, -1, -1).contiguous()
    return ArrayData("digits", images, torch.from_numpy(bundle.target).long()[rows], num_classes=10)


def digit_masks(split: str = "train", image_size: int = 64, val_fraction: float = 0.2, seed: int = 0) -> ArrayData:
    """The handwritten digits, with the class of each pixel: 1 where it is inked.

    Inputs float32 ``(1, H, H)`` as of :func:`digits`; targets int64 ``(H, H)``, 1 where the input is above its mean.

    Raises:
        ImportError, ValueError: as of :func:`digits`.
    """
    images = digits(split, image_size, 1, val_fraction, seed).inputs
    return ArrayData("digit-masks", images, (images[:, 0] > 0).long(), num_classes=2)


def python_source(
    split: str = "train",
    tokens: int = 128,
    max_bytes: int = 2**20,
    val_fraction: float = 0.1,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
) -> ArrayData:
    """Text to model byte by byte: the ``.py`` files of Python's standard library, as installed.

    Inputs int64 ``(T,)`` with T = ``tokens``, targets int64 ``(T,)`` one byte further on; vocabulary 256. The first
    ``max_bytes`` bytes of the files in a seeded order are cut into windows without overlap; the last ``val_fraction``
    of the windows is the validation split. The text depends on the installed Python version.

    Args:
        split: "train" or "val".
        tokens: T.
        max_bytes: how much text to read, in bytes.
        val_fraction: share of the windows kept for validation.
        seed: order of the files.
        root: read ``.py`` files below this folder in place of the standard library's top folder.

    Raises:
        FileNotFoundError: no ``.py`` files there.
        ValueError: unknown split, or too little text for one window in each split.
    """
    check_split(split)
    folder = Path(sysconfig.get_paths()["stdlib"] if root is None else root).expanduser()
    # The standard library's top level only: installed packages live below it.
    files = sorted(folder.glob("*.py") if root is None else folder.rglob("*.py"))
    if not files:
        raise FileNotFoundError(f"python_source: no .py files in {str(folder)!r}: pass root=, a folder that has some")
    text = bytearray()
    for index in torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist():
        text += files[index].read_bytes()
        if len(text) >= max_bytes:
            break
    count = (min(len(text), max_bytes) - 1) // tokens
    val_count = max(1, round(count * val_fraction))
    if count <= val_count:
        raise ValueError(
            f"python_source: {min(len(text), max_bytes)} bytes make {max(count, 0)} windows of {tokens} tokens, "
            "too few to split: raise max_bytes or lower tokens"
        )
    stream = torch.frombuffer(text, dtype=torch.uint8)[: count * tokens + 1].long()
    inputs = stream[:-1].view(count, tokens)
    targets = stream[1:].view(count, tokens)
    rows = slice(0, count - val_count) if split == "train" else slice(count - val_count, count)
    return ArrayData("python-source", inputs[rows], targets[rows], num_classes=256)


def next_byte(split: str = "train", tokens: int = 64, **more: Any) -> ArrayData:
    """Windows of :func:`python_source`, each with the byte behind it as its class: inputs ``(T,)``, targets of 256.

    Raises:
        FileNotFoundError, ValueError: as of :func:`python_source`.
    """
    text = python_source(split, tokens, **more)
    return ArrayData("next-byte", text.inputs, text.targets[:, -1].contiguous(), num_classes=256)
