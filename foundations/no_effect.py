"""The two warnings of this package, and the one way to give them: once, on the first rank, at the user's line."""

from __future__ import annotations

import sys
import types
import warnings

import torch.distributed as dist

__all__ = ["DifferenceWarning", "NoEffectWarning", "is_library", "warn_difference", "warn_no_effect"]

_LIBRARIES = (
    *("retime", "torch", "torchmetrics", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
    *("accelerate", "transformers", "hydra", "jsonargparse", "pluggy", "_pytest", "pytest"),
)
"""Packages whose frames are not the user's, beside Python's own."""


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


def is_library(module: str) -> bool:
    """Whether a module of this name belongs to a library, and its lines are not the user's."""
    return module.partition(".")[0] in _LIBRARIES


def _depth_of_users_line() -> int:
    """Return the ``stacklevel``, as :func:`_warn` counts, of the innermost frame that no library owns.

    Where a process has none, as a spawned rank has, it is the outermost frame of a library that started no process.
    """
    frame: types.FrameType | None = sys._getframe(2)
    depth, outermost = 2, 3
    while frame is not None:
        module = _module_of(frame)
        if not is_library(module) and module.partition(".")[0] not in sys.stdlib_module_names:
            return depth
        if is_library(module) and "multiprocessing" not in module:
            outermost = depth
        if module in ("multiprocessing.spawn", "multiprocessing.forkserver"):
            break  # what is outside of it is the process's command line
        frame, depth = frame.f_back, depth + 1
    return outermost


def _module_of(frame: types.FrameType) -> str:
    """Return the module's name, of ``python -m`` too."""
    name: str = frame.f_globals.get("__name__", "")
    return getattr(frame.f_globals.get("__spec__"), "name", name) if name == "__main__" else name
