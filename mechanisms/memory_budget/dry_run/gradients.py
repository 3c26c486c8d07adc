"""What holds gradients, and when: choices of a :class:`TrainingStep`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from torch import Tensor

__all__ = ["Buckets", "Gradients", "check_held", "drop_gradients"]

Gradients = Literal["freed", "freed after forward", "kept"]
Buckets = Literal["", "beside", "gradients"]


def check_held(gradients: str, buckets: str) -> None:
    """Raise what there is to choose from if these are no choices.

    Raises:
        ValueError: an unknown choice.
    """
    for name, choice, choices in (("gradients", gradients, Gradients), ("buckets", buckets, Buckets)):
        if choice not in get_args(choices):
            raise ValueError(f"{name}={choice!r} is none of {', '.join(map(repr, get_args(choices)))}")


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Nobody holds gradients in ``.grad`` any more."""
    for parameter in parameters:
        parameter.grad = None
