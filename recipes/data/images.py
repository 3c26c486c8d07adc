"""Folders of images in ImageNet's layout, read with Pillow and torch alone.

Legend: H image height and width.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.utils.data import Dataset

from retime.recipes.data.base import Example, Normalise, check_split, existing_folder, shuffled, split_rows

IMAGE_ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


class ImageFolder(Dataset[Example]):
    """Images read from disk when asked for; see `image_folder`. ``classes[i]`` names the folder of class i."""

    is_synthetic = False

    def __init__(self, name: str, files: list[tuple[Path, int]], classes: list[str], image_size: int) -> None:
        self.name = name
        self.files = files
        self.classes = classes
        self.num_classes = len(classes)
        self.image_size = image_size
        self.normalise = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's statistics

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Example:
        from PIL import Image

        path, label = self.files[index]
        size = self.image_size
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except OSError as error:  # Pillow's own errors are OSErrors too
            raise ValueError(f"{str(path)!r} is not a readable image ({error}): remove or replace it") from error
        # Shorter side to 8/7 of the size (256 for 224), then the centre: the usual evaluation crop.
        scale = size * 8 / 7 / min(image.size)
        width, height = (round(side * scale) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return self.normalise(pixels.view(size, size, 3).permute(2, 0, 1)), torch.tensor(label)


def class_folders(folder: Path) -> list[str]:
    """Names of the folders in ``folder``, sorted; hidden ones are left out."""
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def image_folder(
    path: str | os.PathLike[str],
    split: str = "train",
    image_size: int = 224,
    val_fraction: float = 0.1,
    seed: int = 0,
    name: str = "image-folder",
) -> ImageFolder:
    """Images in ImageNet's layout: one folder a class, in ``path/train`` and ``path/val`` or directly in ``path``.

    Inputs float32 ``(3, H, H)`` with H = ``image_size``, centre-cropped and normalised with ImageNet's statistics;
    targets int64, classes in alphabetical order. Without ``train`` and ``val`` folders, a seeded ``val_fraction`` of
    all images is the validation split; the order is a seeded one. There is no augmentation: the recipes compare runs
    that must see equal pixels.

    Raises:
        FileNotFoundError: no such folder, or no images in class folders.
        ImportError: Pillow is not installed.
        ValueError: unknown split, or train and val have different classes; later, an image that cannot be read.
    """
    check_split(split)
    try:
        import PIL.Image  # noqa: F401 - fail here rather than in a data-loading worker
    except ImportError as error:
        raise ImportError("image_folder reads images with Pillow: pip install pillow") from error
    root = existing_folder(path, name, "synthetic_images")
    has_splits = (root / "train").is_dir() and (root / "val").is_dir()
    folder = root / split if has_splits else root
    classes = class_folders(folder)
    if has_splits and class_folders(root / "train") != class_folders(root / "val"):
        raise ValueError(f"{name}: {str(root)!r} has different class folders in train and val: labels would not agree")
    files = [
        (file, label)
        for label, each in enumerate(classes)
        for file in sorted((folder / each).iterdir())
        if file.suffix.lower() in IMAGE_ENDINGS
    ]
    if not files:
        raise FileNotFoundError(
            f"{name}: no images in class folders of {str(folder)!r}: expected train/<class>/<image> and "
            f"val/<class>/<image>, or <class>/<image>, with one of the endings {', '.join(IMAGE_ENDINGS)}"
        )
    rows = shuffled(len(files), seed) if has_splits else split_rows(len(files), split, val_fraction, seed)
    return ImageFolder(name, [files[row] for row in rows.tolist()], classes, image_size)
