"""What every ``report()`` returns: one shape, to print, to log in a line, and to keep as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from retime.foundations.messages import because

COLUMNS = 100
"""A printed line has at most so many characters."""
_MOST_LINES = {"": 4, "plain": 4, "measured": 4, "try next": 3}
"""Of each part; 15 together."""


def each_because(counts: Mapping[str, int], what: str) -> list[str]:
    """Say how often something happened and why, a text a reason: ``"3 steps because ..."``."""
    return [because({reason: count}, what) for reason, count in counts.items()]


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
        """What was done, in one line."""
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
