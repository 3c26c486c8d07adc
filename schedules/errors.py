"""The one error of this package, the mark that shows where a schedule is wrong, and the check of counts."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

# A step of a deep network is a line of hundreds of tasks; the reader needs the neighbourhood of the mark.
_NEIGHBOURS_SHOWN = 8


class ScheduleError(ValueError):
    """A schedule, or a piece of text that should be one, is wrong; the message says what and marks the place."""


def check_count(least: int = 1, also: str = "", /, **counts: object) -> None:
    """Raise an error for an argument that is no whole number, or too small a one.

    Args:
        least: the smallest allowed.
        also: what the message adds, such as ``", or None for no limit"``.
        counts: by the arguments' names.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below ``least``.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r}: give a whole number, {least} or more{also}")
        if value < least:
            raise ValueError(f"{name}={value!r}: give {least} or more{also}")


def mark(words: Sequence[str], position: int, *, prefix: str = "") -> str:
    """Return ``words`` as one line and, under it, carets below the word at ``position``.

    Args:
        words: the tasks of one lane, as text.
        position: index into ``words`` of the one to mark.
        prefix: what the line starts with, such as ``"compute: "``.
    """
    first = max(0, position - _NEIGHBOURS_SHOWN)
    last = min(len(words), position + _NEIGHBOURS_SHOWN + 1)
    before = [*(["..."] if first else []), *words[first:position]]
    after = [*words[position + 1 : last], *(["..."] if last < len(words) else [])]
    column = len(prefix) + sum(len(word) + 1 for word in before)
    line = prefix + " ".join([*before, words[position], *after])
    return f"  {line}\n  {' ' * column}{'^' * len(words[position])} <-- ERROR HERE"
