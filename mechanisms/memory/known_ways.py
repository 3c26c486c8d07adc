"""Notices that sub-batches compute something else than what was examined: a loss term from an epoch on, say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["KnownWays"]

_ENOUGH = 3


class KnownWays:
    """The ways through the model that were examined, known by how many graph nodes a forward pass makes.

    Those of the first batch are the ones that the certificate was given for.

    Attributes:
        new: a pass has gone another way since.
        examined: how often a new one turned out to be as separable as those before.
    """

    def __init__(self) -> None:
        self.new = False
        self.examined = 0
        self._known: set[int] = set()
        self._first = True

    @property
    def many(self) -> bool:
        """The step takes another way from batch to batch: examining each would take longer than training."""
        return self.examined >= _ENOUGH

    def begin(self) -> None:
        """A batch begins."""
        self._first = not self._known

    def accept(self) -> None:
        """The new ways were examined."""
        self.new = False
        self.examined += 1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a sub-batch's forward pass."""
        began = torch._C._autograd._get_sequence_nr()
        yield
        nodes = torch._C._autograd._get_sequence_nr() - began
        if nodes not in self._known:
            self._known.add(nodes)
            self.new |= not self._first and not self.many
