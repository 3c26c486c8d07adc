"""What goes into a layer and comes out: nested values taken apart, their tensors' shapes, and stand-ins for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private import base_of, kept_version, tree_flatten, tree_map, tree_unflatten

__all__ = ["TensorKind", "ValueKind", "kind_of", "leads_to", "replaced_tensors", "shapes_of", "tensors_in_order"]


@dataclass(frozen=True)
class TensorKind:
    """A tensor without its values.

    Attributes:
        shape: of it.
        dtype: of it.
        requires_grad: whether a gradient goes back to it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        """The kind of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """How many bytes its values take."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Memory for one."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def stand_in(self, device: torch.device) -> Tensor:
        """A tensor of this kind that takes no memory: not a number, so that whoever reads it shows."""
        value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        one = torch.full((1,), value, dtype=self.dtype, device=device)
        # not by expand(): a view cannot become another tensor
        return one.new_empty(0).set_(one.untyped_storage(), 0, self.shape, (0,) * len(self.shape))


@dataclass(frozen=True)
class ValueKind:
    """A nested value with the kinds of its tensors in their places.

    Attributes:
        value: what is neither tensor, number nor text is None in it.
    """

    value: Any

    def stand_in(self, device: torch.device) -> Any:
        """A value of this kind; see :meth:`TensorKind.stand_in`."""
        return tree_map(lambda leaf: leaf.stand_in(device) if isinstance(leaf, TensorKind) else leaf, self.value)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """A value of this kind with these tensors, in order."""
        given = iter(tensors)
        return tree_map(lambda leaf: next(given) if isinstance(leaf, TensorKind) else leaf, self.value)

    @property
    def tensors(self) -> list[TensorKind]:
        """The kinds of its tensors, in order."""
        return [leaf for leaf in tree_flatten(self.value)[0] if isinstance(leaf, TensorKind)]


def kind_of(value: Any) -> ValueKind:
    """The kind of a nested value."""
    return ValueKind(tree_map(_kind, value))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return TensorKind.of(leaf)
    return leaf if isinstance(leaf, bool | int | float | str) else None


def tensors_in_order(value: Any) -> list[Tensor]:
    """The tensors of a nested value."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def replaced_tensors(value: Any, tensors: dict[int, Tensor]) -> Any:
    """A copy of a nested value with other tensors at some places of :func:`tensors_in_order`."""
    leaves, structure = tree_flatten(value)
    number, found = 0, []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append(tensors.get(number, leaf))
            number += 1
        else:
            found.append(leaf)
    return tree_unflatten(found, structure)


def shapes_of(value: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and types of a nested value's tensors: what tells one kind of batch from another."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in_order(value))


def leads_to(old: Tensor, new: Tensor, *, has_backward: bool, written: bool) -> tuple[Tensor, Tensor]:
    """Let a tensor, wherever user code holds it, have the values of another, and its graph end there.

    Args:
        old: came from a layer, or stands for what did. A view stays what it is.
        new: without a graph, but it may need a gradient.
        has_backward: the graph of ``old`` is run backward on this rank.
        written: a layer writes into it.

    Returns:
        What to use in the place of ``old``, itself where that can be; and the leaf that gets the gradient.
    """
    if base_of(old) is not None:
        return new.clone() if written else new, new
    old.detach_().data = new.detach()
    if not new.requires_grad:
        return old, new
    # no leaf, so that layers may write into it, as ReLU(inplace=True) does
    with kept_version(old):  # the graph, or a checkpoint, may have saved it, so it must not count as written into
        led: Tensor = _LeadsTo.apply(old, new)  # type: ignore[no-untyped-call]
    return led.clone() if written and has_backward else led, new


class _LeadsTo(torch.autograd.Function):
    """A tensor without a graph, as if it had been computed from another with the same values."""

    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor) -> Tensor:
        ctx.mark_dirty(old)
        return old

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
