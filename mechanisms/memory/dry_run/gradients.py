"""What holds gradients, and when: choices of a :class:`~retime.mechanisms.memory.dry_run.training_step.TrainingStep`."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["Buckets", "Gradients", "check_held"]

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
