"""What a plan is made for: batches of one shape, and the model as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from retime.foundations.parts.split import tensors_of
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import post_accumulate_hooks, sparse_indices, sparse_values

__all__ = ["key_of", "name_of", "no_larger", "sizes_of"]


def key_of(batch: Any, model: nn.Module, gradients: str) -> tuple[Any, ...]:
    """Everything of the batch's shape but how many samples it has, and the model as it is.

    A layer that is frozen, or put into another mode, computes and saves other things. Hooks that wait for whole
    gradients keep batches whole.
    """
    flags = [module.training for module in model.modules()]
    for parameter in model.parameters():
        flags += [parameter.requires_grad, bool(post_accumulate_hooks(parameter))]
    shapes = [(place, tuple(tensor.shape[1:]), tensor.dtype) for place, tensor in tensors_of(batch).items()]
    return gradients, crc32(bytes(flags)), tuple(shapes)


def name_of(key: tuple[Any, ...]) -> str:
    """A key as text, for a checkpoint."""
    *model, shapes = key
    return "; ".join([*map(str, model), *(f"{place} {list(shape)} {dtype}" for place, shape, dtype in shapes)])


def sizes_of(batch: Any) -> tuple[int, ...]:
    """Bytes of each tensor, those in objects too; a sparse one has values and indices."""
    return tuple(_bytes_of(tensor) for tensor in tensors_in(batch))


def no_larger(sizes: Sequence[int], planned: Sequence[int]) -> bool:
    """Whether a plan for batches of ``planned`` sizes holds: samples of graphs or packed tokens differ in size."""
    return len(sizes) == len(planned) and all(one <= other for one, other in zip(sizes, planned, strict=True))


def _bytes_of(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return sparse_values(tensor).nbytes + sparse_indices(tensor).nbytes
    return tensor.nbytes
