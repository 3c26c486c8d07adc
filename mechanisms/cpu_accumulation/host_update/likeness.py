"""Whether the ranks have the same weights and gradients, so that the update of one is that of all."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private import version_of

__all__ = ["Likeness"]

_COMPARED = 16
"""Parameters of which ranks compare one number in each step: others in the next step."""


class Likeness:
    """Numbers that are the same on ranks whose parameters are alike, and almost surely not on others.

    To compare all would take a turn through memory. But gradients that are not reduced differ everywhere, so a few of
    their numbers tell; and weights only differ where something else than the step has written, which torch counts.
    """

    def __init__(self) -> None:
        self._versions: dict[Tensor, int] = {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """These are what the ranks have made alike."""
        self._versions |= {one: version_of(one) for one in parameters}

    def weights(self, parameters: Iterable[Tensor]) -> int:
        """Of all the weights that were written into since they were noted."""
        written = (one for one in parameters if self._versions.get(one) != version_of(one))
        return zlib.crc32(repr([_sum_of_bits(one) for one in written]).encode())

    def sample(self, parameters: Sequence[Tensor], step: int) -> int:
        """Of one number of some gradients, and of their weights."""
        first = step * _COMPARED % max(1, len(parameters))
        some = [*parameters[first:], *parameters[:first]][:_COMPARED]
        numbers = [
            (_number(one.grad, step), _number(one, step)) for one in some if one.grad is not None and one.numel()
        ]
        return zlib.crc32(repr(numbers).encode())


def _sum_of_bits(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    return int(flat.view(torch.int16 if flat.itemsize == 2 else torch.int32).sum())


def _number(tensor: Tensor, step: int) -> Any:
    place = step * 7919 % tensor.numel()
    index = []
    for size in reversed(tensor.shape):
        index.append(place % size)
        place //= size
    return tensor.detach()[tuple(reversed(index))].item()
