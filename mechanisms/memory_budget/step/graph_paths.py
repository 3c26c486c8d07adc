"""Notices that sub-batches compute something else than what was examined: a loss term from an epoch on, say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from retime.foundations.torch_private import check_saved_values, loss_choices
from retime.mechanisms.memory_budget.separability import Compared

__all__ = ["AnotherPath", "GraphPaths"]

_ENOUGH = 3


class AnotherPath(BaseException):  # no error: the caller begins the batch again, when this path has been examined
    """The first sub-batch of a batch took a path that nobody has examined."""


class GraphPaths:
    """The paths through the model that were examined, known by the graph that a forward pass makes.

    Those of the first batch are the ones that the certificate was given for.

    Args:
        constants: what entries of the batch are compared with is a part of a path too.

    Attributes:
        new: a pass has taken another path since.
        new_at_once: the first pass of the batch that is under way has: nothing of it has gone backward yet.
        stopped: so the batch was stopped, and begins again.
        examined: how often a new one turned out to be as separable as those before.
    """

    def __init__(self, constants: bool = False) -> None:
        self.new = self.new_at_once = self.stopped = False
        self.examined = 0
        check_saved_values()
        self._constants = constants
        self._known: set[int] = set()
        self._first = True
        self._passes = 0

    @property
    def many(self) -> bool:
        """The step takes another path from batch to batch: examining each would take longer than training."""
        return self.examined >= _ENOUGH

    def begin(self) -> None:
        """A batch begins."""
        self._first = not self._known
        self._passes, self.new_at_once = 0, False

    def accept(self) -> bool:
        """The new paths were examined; returns :attr:`stopped`."""
        stopped, self.stopped = self.stopped, False
        self.new = False
        self.examined += 1
        return stopped

    @contextmanager
    def watched(self) -> Iterator[Watched]:
        """Around a sub-batch's forward pass, which puts its loss into :attr:`Watched.loss`."""
        seen = Watched()
        if self._constants:
            with Compared() as compared:
                yield seen
            path = hash((_path_of(seen.loss), frozenset(compared.constants)))
        else:
            yield seen
            path = _path_of(seen.loss)
        if path not in self._known:
            self._known.add(path)
            new = not self._first and not self.many
            self.new |= new
            self.new_at_once = new and not self._passes
        self._passes += 1


class Watched:
    """A forward pass that is watched.

    Attributes:
        loss: what it gave.
    """

    loss: Tensor | None = None


def _path_of(loss: Tensor | None) -> int:
    """A number for the graph behind a loss: its operations in order, how losses are reduced and what they ignore.

    And whether they weigh classes: only that, as any weights keep a batch whole. The saved tensor is not unpacked,
    which would bring it back from the host.
    """
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
            names += loss_choices(node)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return hash(tuple(names))
