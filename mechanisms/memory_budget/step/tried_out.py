"""Whether the step that runs at the moment is only tried out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TriedOut"]


class TriedOut:
    """Called for a context around everything that calls a step without its result being wanted.

    Attributes:
        now: such a context is open.
    """

    def __init__(self) -> None:
        self.now = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before, self.now = self.now, True
        try:
            yield
        finally:
            self.now = before
