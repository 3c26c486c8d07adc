"""What a step returned or logged for the parts of a batch, put together as for the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from retime.foundations.parts.split import leaves_of, map_leaves
from retime.foundations.storages import has_storage

_NONE: Mapping[str, Tensor] = MappingProxyType({})


class WholeOutput:
    """What a step returns for the parts of a batch, put together while they come.

    Of a tensor with one entry a sample only the whole batch's is kept, into which each part's entries are copied: all
    parts' tensors and then the joined one would need the memory twice.

    Args:
        samples: of each part, in order.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._parts: list[Any] = []
        self._whole: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, output: Any) -> None:
        """The next part's output, which is not held: tensors of it are detached, or copied."""
        index = len(self._parts)
        first = sum(self._samples[:index])
        size = self._samples[index]

        def keep(place: str, leaf: Any) -> Any:
            if index == 0 and len(self._samples) > 1 and has_entries(leaf, size):
                self._whole[place] = leaf.new_empty((sum(self._samples), *leaf.shape[1:]), requires_grad=False)
            whole = self._whole.get(place)
            if whole is not None and has_entries(leaf, size) and _alike(whole, leaf):
                return whole[first : first + size].copy_(leaf.detach())
            self._whole.pop(place, None)  # entries that were copied live on in the parts that they are from
            return leaf.detach() if isinstance(leaf, Tensor) else leaf

        self._parts.append(map_leaves(output, keep, "output"))

    def result(self, weights_of: Callable[[str], Sequence[float]]) -> Any:
        """The whole batch's output once all parts have been added; as :func:`combined`."""
        if len(self._samples) == 1:
            return self._parts[0]
        return combined(self._parts, self._samples, weights_of, self._whole)


def has_entries(leaf: Any, samples: int) -> bool:
    """Whether an output is a tensor with one entry a sample."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples and has_storage(leaf)


def combined(
    outputs: Sequence[Any],
    samples: Sequence[int],
    weights_of: Callable[[str], Sequence[float]],
    whole: Mapping[str, Tensor] = _NONE,
) -> Any:
    """One output for the whole batch, of the same structure as each part's.

    Scalars are weighed; tensors and lists with one entry a sample are joined; what is the same in all parts stays; for
    anything else there is a list of the parts' values.

    Args:
        outputs: one a part, detached.
        samples: how many samples each part has.
        weights_of: from a place, such as ``"output['loss']"``, to the parts' weights for that scalar.
        whole: what is joined already, by place.

    Raises:
        ValueError: the parts' outputs differ in structure.
    """
    tables = [dict(leaves_of(output, "output")) for output in outputs]

    def join(place: str, _: Any) -> Any:
        try:
            leaves = [table[place] for table in tables]
        except KeyError:
            raise ValueError(f"the step returned {place} for one sub-batch and not for another") from None
        if place in whole:
            return whole[place]
        return _joined(leaves, samples, weights_of(place) if _is_scalar(leaves[0]) else ())

    return map_leaves(outputs[0], join, "output")


def combined_scalar(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted sum of scalars: tensors give a detached tensor, numbers a number.

    Values with weight 0 are left out: a mean over nothing has no value. Sums of whole numbers stay whole.
    """
    terms = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight] or [(math.nan, 1.0)]
    whole = all(weight == 1 for _, weight in terms)
    first = values[0]
    if not isinstance(first, Tensor):
        if whole and all(isinstance(value, int) for value, _ in terms):
            return sum(value for value, _ in terms)
        return math.fsum(weight * float(value) for value, weight in terms)
    exact = whole and not first.is_floating_point()
    total = torch.zeros((), dtype=torch.int64 if exact else _widest(first), device=first.device)
    for value, weight in terms:
        total = total + (torch.as_tensor(value, device=first.device).detach().reshape(()) * (1 if exact else weight))
    return total.to(first.dtype if exact or first.is_floating_point() else torch.float32).reshape(first.shape)


def _joined(leaves: list[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    if _is_scalar(leaves[0]):
        return combined_scalar(leaves, weights)
    if all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        if all(leaf.shape[0] == size for leaf, size in zip(leaves, samples, strict=True)):
            return torch.cat(leaves)
        return leaves
    if all(isinstance(leaf, list | tuple) and len(leaf) == size for leaf, size in zip(leaves, samples, strict=True)):
        return type(leaves[0])(entry for leaf in leaves for entry in leaf)
    plain = isinstance(leaves[0], str | bytes | bool)
    if all(leaf is leaves[0] or (plain and type(leaf) is type(leaves[0]) and leaf == leaves[0]) for leaf in leaves):
        return leaves[0]
    return leaves


def _alike(whole: Tensor, leaf: Tensor) -> bool:
    """Whether entries can be copied from one to the other, and stay what they are."""
    return (whole.shape[1:], whole.dtype, whole.device) == (leaf.shape[1:], leaf.dtype, leaf.device)


def _is_scalar(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() == 0 and leaf.dtype != torch.bool
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _widest(tensor: Tensor) -> torch.dtype:
    """Half precision would lose what a few parts add."""
    if tensor.device.type == "mps":
        return torch.float32
    return torch.complex128 if tensor.is_complex() else torch.float64
