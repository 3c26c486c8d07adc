"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from a user's own copy, in the Python (pickled) or the binary version.

Legend: n images.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retime.recipes.data.base import ArrayData, Normalise, check_split, existing_folder

IMAGE_BYTES = 3 * 32 * 32


class Layout(NamedTuple):
    """Layout of one of the two datasets on disk."""

    name: str
    files: dict[str, list[str]]
    folders: tuple[str, ...]  # what the two archives unpack to
    label_key: bytes  # in the Python version
    label_bytes: int  # labels in front of an image in the binary version; the last one is used
    num_classes: int
    normalise: Normalise


CIFAR10 = Layout(
    name="cifar10",
    files={"train": [f"data_batch_{index}" for index in range(1, 6)], "val": ["test_batch"]},
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    label_key=b"labels",
    label_bytes=1,
    num_classes=10,
    normalise=Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
CIFAR100 = Layout(
    name="cifar100",
    files={"train": ["train"], "val": ["test"]},
    folders=("cifar-100-python", "cifar-100-binary"),
    label_key=b"fine_labels",
    label_bytes=2,
    num_classes=100,
    normalise=Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)


class ArrayUnpickler(pickle.Unpickler):
    """Reads pickles of plain containers and numpy arrays only: a pickle may otherwise run any code it likes."""

    def find_class(self, module: str, name: str) -> Any:
        """The few names that a pickled array needs.

        Raises:
            pickle.UnpicklingError: any other name.
        """
        import _codecs

        import numpy as np

        # CIFAR's files name numpy.core.multiarray, newer ones numpy._core.multiarray: take its function where it is.
        rebuild = np.zeros(0).__reduce__()[0]
        allowed: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _codecs.encode,
            ("numpy.core.multiarray", "_reconstruct"): rebuild,
            ("numpy._core.multiarray", "_reconstruct"): rebuild,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which image data have no use for")
        return allowed[module, name]


def read_file(path: Path, layout: Layout) -> tuple[Tensor, Tensor]:
    """Images uint8 ``(n, 3072)`` and labels int64 ``(n,)`` of one file in either version.

    Raises:
        ValueError: the file does not hold images and labels of this dataset.
    """
    try:
        if path.suffix == ".bin":
            content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            records = content.view(-1, layout.label_bytes + IMAGE_BYTES)
            images, labels = records[:, layout.label_bytes :], records[:, layout.label_bytes - 1].long()
        else:
            with path.open("rb") as file:
                batch = ArrayUnpickler(file, encoding="bytes").load()
            images, labels = torch.from_numpy(batch[b"data"].copy()), torch.tensor(batch[layout.label_key])
        if images.dtype != torch.uint8 or images.shape != (len(labels), IMAGE_BYTES) or not len(labels):
            raise ValueError(f"{len(labels)} labels for images of shape {tuple(images.shape)} and type {images.dtype}")
        if not 0 <= int(labels.min()) <= int(labels.max()) < layout.num_classes:
            raise ValueError(f"labels from {int(labels.min())} to {int(labels.max())}")
    # A damaged pickle can fail in almost any way; all of them mean the same to the user.
    except Exception as error:
        raise ValueError(f"{str(path)!r} is not a {layout.name} file ({error}): unpack the archive again") from error
    return images, labels


def load(path: str | os.PathLike[str], split: str, layout: Layout) -> ArrayData:
    """The split of the dataset that ``layout`` describes, from ``path`` or an archive's folder in it; pickled first."""
    check_split(split)
    root = existing_folder(path, layout.name, f"synthetic_images(num_classes={layout.num_classes}, image_size=32)")
    folders, names = (root, *(root / each for each in layout.folders)), layout.files[split]
    places = [[folder / (name + suffix) for name in names] for suffix in ("", ".bin") for folder in folders]
    files = next((paths for paths in places if all(path.is_file() for path in paths)), None)
    if files is None:
        raise FileNotFoundError(
            f"{layout.name}: {str(root)!r} has neither {', '.join(names)} (Python version) nor the same names with "
            f".bin (binary version): pass the folder that the archive unpacked to ({' or '.join(layout.folders)})"
        )
    parts = [read_file(file, layout) for file in files]
    inputs = torch.cat([images for images, _ in parts]).view(-1, 3, 32, 32)
    targets = torch.cat([labels for _, labels in parts])
    return ArrayData(layout.name, inputs, targets, layout.num_classes, normalise=layout.normalise)


def cifar10(path: str | os.PathLike[str], split: str = "train") -> ArrayData:
    """CIFAR-10: the 50000 training images, or the 10000 test images as "val".

    Inputs float32 ``(3, 32, 32)``, normalised by channel (kept as uint8 in memory); targets int64 in 0..9. ``path`` is
    the folder with ``data_batch_1`` ... (or ``data_batch_1.bin`` ...), or its parent.

    Raises:
        FileNotFoundError: no such folder, or the files are not in it.
        ValueError: unknown split, or a file that is no CIFAR-10 file.
    """
    return load(path, split, CIFAR10)


def cifar100(path: str | os.PathLike[str], split: str = "train") -> ArrayData:
    """CIFAR-100 with its fine labels: the 50000 training images, or the 10000 test images as "val".

    Inputs float32 ``(3, 32, 32)``, normalised by channel (kept as uint8 in memory); targets int64 in 0..99. ``path`` is
    the folder with ``train`` and ``test`` (or ``train.bin`` and ``test.bin``), or its parent.

    Raises:
        FileNotFoundError: no such folder, or the files are not in it.
        ValueError: unknown split, or a file that is no CIFAR-100 file.
    """
    return load(path, split, CIFAR100)
