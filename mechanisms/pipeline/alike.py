"""Layers that are alike: what is measured of one holds for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from torch import Tensor, nn

__all__ = ["alike", "typical"]


def alike(layers: Sequence[nn.Module], given: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """The numbers of the layers, those of one class, with parameters and inputs of the same shapes, together."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for number, (layer, tensors) in enumerate(zip(layers, given, strict=True)):
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        kind = type(layer), tuple(tuple(p.shape) for p in layer.parameters()), shapes
        found.setdefault(kind, []).append(number)
    return list(found.values())


def typical(values: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    """Each layer's value, as the median of those of its group."""
    found = list(values)
    for numbers in groups:
        middle = median(values[number] for number in numbers)
        for number in numbers:
            found[number] = middle
    return found
