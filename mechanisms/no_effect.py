"""The two warnings of this package, and the one way to give them: once, on the first rank, at the user's line."""

from __future__ import annotations

import sys
import warnings

import torch.distributed as dist

__all__ = ["DifferenceWarning", "NoEffectWarning", "warn_difference", "warn_no_effect"]

_LIBRARIES = (
    "retime",
    "torch",
    "lightning",
    "lightning_fabric",
    "accelerate",
    "transformers",
    "contextlib",
    "threading",
)
"""Packages whose frames are not the user's."""


class NoEffectWarning(UserWarning):
    """A step runs the plain way: the text says why, and what to change so that the mechanism applies."""


class DifferenceWarning(UserWarning):
    """Training or what it shows differs from the plain step's: the text says in what, and how to avoid it."""


def warn_no_effect(text: str, *, every_rank: bool = False) -> None:
    """Give a :class:`NoEffectWarning` at the line of the user's program that led here.

    Args:
        text: why the step runs the plain way, and what to change.
        every_rank: for what the first rank of a process group cannot know.
    """
    _warn(text, NoEffectWarning, every_rank)


def warn_difference(text: str, *, every_rank: bool = False) -> None:
    """Give a :class:`DifferenceWarning` at the line of the user's program that led here.

    Args:
        text: what differs, and how to avoid it.
        every_rank: for what the first rank of a process group cannot know.
    """
    _warn(text, DifferenceWarning, every_rank)


def _warn(text: str, category: type[UserWarning], every_rank: bool) -> None:
    if every_rank or not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warnings.warn(text, category, stacklevel=_depth_of_users_line())


def _depth_of_users_line() -> int:
    """Return the ``stacklevel``, as :func:`_warn` counts, of the innermost frame that no library owns."""
    frame, depth = sys._getframe(2), 2
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return depth
        frame, depth = frame.f_back, depth + 1
    return 3
