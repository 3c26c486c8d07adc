"""What users are told: two warnings, given once, on the first rank, at the user's line; and what ``report()`` returns.

A report has one shape, to print, to log in a line, and to keep as JSON.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
import sys
import textwrap
import types
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch.distributed as dist

# Counts by reason, as reports print them.


def format_counts(counts: Mapping[str, int], what: str = "") -> str:
    """Say how often something happened and why: ``"3 replanned because ...; 1 replanned because ..."``.

    Args:
        counts: by reason.
        what: happened, where the report has not said so before.
    """
    did = f" {what}" if what else ""
    return "; ".join(f"{count}{did} because {reason}" for reason, count in counts.items())


# Numbers of bytes, as people write and read them.

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(name: str, size: int | str, *, least: int = 1, examples: str = "'8GiB' or '500MB'") -> int:
    """The whole number of bytes that an argument asks for.

    Args:
        name: the argument's, for errors.
        size: bytes, or a text: ``"8GiB"``, ``"500 MB"``, ``"1.5gib"``.
        least: the smallest number that can be meant.
        examples: what an error offers instead.

    Raises:
        TypeError: neither a whole number nor a text.
        ValueError: it cannot be read, or is too small.
    """
    given: Any = size  # one of numpy's whole numbers is no int, and may be too small to count with
    if isinstance(given, bool) or not isinstance(given, numbers.Integral | str):
        raise TypeError(f"{name}={size!r} must be a number of bytes, or a text such as {examples}")
    if isinstance(given, str):
        match = _FORM.fullmatch(given.strip())
        if not match:
            raise ValueError(f"{name}={size!r} cannot be read: write bytes, {examples}")
        count = int(Fraction(match[1]) * (_DECIMAL | _BINARY)[(match[2] or "B").lower()])
    else:
        count = int(given)
    if count < least:
        raise ValueError(f"{name}={size!r} must be {f'{least} or more' if least != 1 else 'above 0'}")
    return count


def show_bytes(count: float) -> str:
    """Bytes in the largest binary unit of which there is one."""
    for unit, size in reversed(_BINARY.items()):
        if count >= size:
            return f"{count / size:.4g} {unit[0].upper()}iB"
    return f"{count:.0f} B"


# The two warnings.

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
    """Return whether a module of this name belongs to a library, and its lines are not the user's."""
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


# What every ``report()`` returns.

COLUMNS = 100
"""A printed line has at most so many characters."""
_MOST_LINES = {"": 4, "plain": 4, "measured": 4, "try next": 3}
"""Of each part; 15 together."""


def each_because(counts: Mapping[str, int], what: str) -> list[str]:
    """Say how often something happened and why, a text a reason: ``"3 steps because ..."``."""
    return [format_counts({reason: count}, what) for reason, count in counts.items()]


class Report:
    """A mixin for what ``report()`` returns, mostly a dataclass of counts.

    Printed, it says in at most 15 lines of 100 columns what was done, what stayed plain and why, what was measured, and
    what to try next. Each of these is a list of texts. A reason that can be helped ends with a semicolon and what to
    change (``"a GradScaler has to see all gradients; use precision='bf16-mixed'"``), which is printed as what to try.
    """

    @abstractmethod
    def what_was_done(self) -> list[str]:
        """Return at least one text; the first can stand alone."""

    def what_stayed_plain(self) -> list[str]:
        """Return what runs as without the method, and why."""
        return []

    def what_was_measured(self) -> list[str]:
        """Return times, sizes and shares."""
        return []

    def what_to_try(self) -> list[str]:
        """Return what a user can change: what the reasons of :meth:`what_stayed_plain` end with."""
        return [remedy for _, remedy in map(_cut, self.what_stayed_plain()) if remedy]

    @property
    def headline(self) -> str:
        """Summary of what was done, in one line."""
        return self.what_was_done()[0]

    @property
    def one_line(self) -> str:
        """All that was done, stayed plain and was measured."""
        return "; ".join((*self.what_was_done(), *self.what_stayed_plain(), *self.what_was_measured()))

    def figures(self) -> dict[str, Any]:
        """Return the numbers by name: of a dataclass, its fields."""
        counts: Any = self
        return {field.name: getattr(counts, field.name) for field in dataclasses.fields(counts)}

    def to_dict(self) -> dict[str, Any]:
        """Return all figures and all texts, in plain types that JSON has."""
        texts = {
            "what_was_done": self.what_was_done(),
            "what_stayed_plain": self.what_stayed_plain(),
            "what_was_measured": self.what_was_measured(),
            "what_to_try": self.what_to_try(),
        }
        figures: dict[str, Any] = _in_plain_types(self.figures())
        return {"report": type(self).__name__} | figures | texts

    def __str__(self) -> str:
        causes = [cause for cause, _ in map(_cut, self.what_stayed_plain())]
        parts = (self.what_was_done(), causes, self.what_was_measured(), self.what_to_try())
        return "\n".join(
            line
            for (label, most), part in zip(_MOST_LINES.items(), parts, strict=True)
            for line in _lines(label, part, most)
        )


def _cut(reason: str) -> tuple[str, str]:
    """Return the cause, and what to change, which may be empty: what follows the last semicolon."""
    cause, semicolon, remedy = reason.rpartition("; ")
    return (cause, remedy) if semicolon else (reason, "")


def _lines(label: str, texts: Sequence[str], most: int) -> list[str]:
    margin = " " * (12 if label else 2)
    begin = f"  {label + ':':10}" if label else ""
    lines: list[str] = []
    for text in dict.fromkeys(texts or ["nothing"]):
        lines += textwrap.wrap(text, COLUMNS, initial_indent=begin, subsequent_indent=margin, break_on_hyphens=False)
        begin = margin
    if len(lines) > most:
        lines[most - 1 :] = [f"{margin}... {len(lines) - most + 1} more lines: report().to_dict() has all"]
    return lines


def _in_plain_types(value: Any) -> Any:
    if isinstance(value, Report):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _in_plain_types(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_in_plain_types(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
