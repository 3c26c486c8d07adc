"""Notices that sub-batches compute something else than what was examined: a loss term from an epoch on, say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from retime.mechanisms.memory.separability_watch import Compared

__all__ = ["KnownWays"]

_ENOUGH = 3
_CHOICES = ("_saved_reduction", "_saved_ignore_index")


class KnownWays:
    """The ways through the model that were examined, known by the graph that a forward pass makes.

    Those of the first batch are the ones that the certificate was given for.

    Args:
        constants: what entries of the batch are compared with is a part of a way too.

    Attributes:
        new: a pass has gone another way since.
        examined: how often a new one turned out to be as separable as those before.
    """

    def __init__(self, constants: bool = False) -> None:
        self.new = False
        self.examined = 0
        self._constants = constants
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
    def watched(self) -> Iterator[Watched]:
        """Around a sub-batch's forward pass, which puts its loss into :attr:`Watched.loss`."""
        seen = Watched()
        if self._constants:
            with Compared() as compared:
                yield seen
            way = hash((_way_of(seen.loss), frozenset(compared.constants)))
        else:
            yield seen
            way = _way_of(seen.loss)
        if way not in self._known:
            self._known.add(way)
            self.new |= not self._first and not self.many


class Watched:
    """A forward pass that is watched.

    Attributes:
        loss: what it gave.
    """

    loss: Tensor | None = None


def _way_of(loss: Tensor | None) -> int:
    """A number for the graph behind a loss: its operations in order, how losses are reduced and what they ignore."""
    names: list[Any] = []
    first = None if loss is None else loss.grad_fn
    waiting, seen = [first], {first}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        name = node.name()
        names.append(name)
        if "Loss" in name or "CrossEntropy" in name:
            names += [getattr(node, choice, None) for choice in _CHOICES]
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return hash(tuple(names))
