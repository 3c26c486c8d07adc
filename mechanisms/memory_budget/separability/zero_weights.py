"""Terms of a loss that count for nothing yet: a probe runs once more as if they had a weight.

A term that is multiplied by 0 in the first batch (a warm-up, a weight of a schedule) has no gradient there, whatever it
does to its samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private import schema_of, tree_leaves

__all__ = ["ZeroWeights"]

_WEIGHT = 0.7310585786300049
"""No number that a step would use."""
_MOST = 256
"""Weights of terms are few; a table of more entries is something else."""
_PRODUCTS = {"mul", "dot", "vdot", "mv", "mm"}
_SCALED = {"add": "alpha", "sub": "alpha", "rsub": "alpha", "addmm": "alpha", "addmv": "alpha", "baddbmm": "alpha"}
_SCALED |= {"addbmm": "alpha", "addr": "alpha", "addcmul": "value", "addcdiv": "value"}


class ZeroWeights:
    """Finds numbers 0 that what follows from samples or parameters is multiplied by.

    Args:
        lifted: another number takes their place.
        number_of: a number for a tensor's storage, which no other gets.

    Attributes:
        found: there was one.
    """

    def __init__(self, lifted: bool, number_of: Callable[[Tensor], int]) -> None:
        self.lifted, self.found = lifted, False
        self._number_of = number_of
        self._derived: set[int] = set()

    def derive(self, tensors: object) -> None:
        """These follow from samples."""
        self._derived.update(self._number_of(one) for one in tree_leaves(tensors) if isinstance(one, Tensor))

    def instead_of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What an operation is given."""
        name = schema_of(func).name.removeprefix("aten::").removesuffix("_")
        if name in _PRODUCTS:
            pairs = zip(args[:2], (args[1], args[0]), strict=True)
            args = (*(self._weight(one, other) for one, other in pairs), *args[2:])
        elif name == "lerp":
            args = (*args[:2], self._weight(args[2], args[0]), *args[3:])
        elif name in _SCALED and kwargs.get(_SCALED[name], 1) == 0:
            kwargs = {**kwargs, _SCALED[name]: self._weight(0, next((one for one in args if self._follows(one)), None))}
        return args, kwargs

    def note(self, args: Any, kwargs: dict[str, Any], result: object) -> None:
        """An operation has run."""
        if any(map(self._is_derived, tree_leaves((args, kwargs)))):
            self.derive(result)

    def _weight(self, value: Any, other: Any) -> Any:
        if not self._follows(other) or not self._is_zero(value):
            return value
        self.found = True
        if not self.lifted:
            return value
        if isinstance(value, Tensor):
            kept = value if value.is_floating_point() else value.to(other.dtype)
            return torch.where(kept == 0, torch.full_like(kept, _WEIGHT), kept)
        return _WEIGHT

    def _is_zero(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return isinstance(value, int | float) and value == 0
        weight = value.numel() == 1 and value.is_leaf and value.requires_grad  # a trained one
        constant = value.numel() <= _MOST and not value.is_complex() and not self._is_derived(value)
        return (weight or constant) and bool((value == 0).any())

    def _follows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and self._is_derived(value)

    def _is_derived(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (value.requires_grad or self._number_of(value) in self._derived)
