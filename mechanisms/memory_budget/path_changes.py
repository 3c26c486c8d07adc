"""What is said when batches, or the path that they take through the model, change while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

from torch import Tensor

from retime.foundations.messages import warn_difference, warn_no_effect
from retime.foundations.parts import Certificate, loss_of
from retime.foundations.torch_private.engine import check_saved_values, loss_choices
from retime.mechanisms.memory_budget.separability import Compared

# Notices that sub-batches compute something else than what was examined: a loss term from an epoch on, say.

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

    def run(self, step: Callable[[Any], Any], part: Any) -> Any:
        """A sub-batch's forward pass, whose path is seen; returns what the step returns."""
        if self.many:  # none is examined any more, and a path a step would fill the memory
            return step(part)
        compared = Compared() if self._constants else None
        with compared or nullcontext():
            output = step(part)
        path = _path_of(loss_of(output))
        if compared is not None:
            path = hash((path, frozenset(compared.constants)))
        if path not in self._known:
            self._known.add(path)
            new = not self._first
            self.new |= new
            self.new_at_once = new and not self._passes
        self._passes += 1
        return output


def _path_of(loss: Tensor) -> int:
    """A number for the graph behind a loss: its operations in order, how losses are reduced and what they ignore.

    And whether they weigh classes: only that, as any weights keep a batch whole. The saved tensor is not unpacked,
    which would bring it back from the host.
    """
    names: list[Any] = []
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
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


OnShapeChange = Literal["replan", "error"]
_MANY_MISMATCHES = 3


def why_anew(samples: int, same_shape: bool) -> str:
    """Say what is wrong about a batch, with ``on_shape_change="error"``."""
    if same_shape:
        return (
            "the plan no longer holds, and on_shape_change='error': layers were frozen, unfrozen or put into another "
            "mode, gradients now stay from batch to batch, or samples are larger. Use on_shape_change='replan'"
        )
    return (
        f"a batch of {samples} samples has another shape than the planned batch, and "
        "on_shape_change='error': bring all batches to one shape, or use on_shape_change='replan'"
    )


def warn_of_dropped(error: Exception) -> None:
    """Plans that came with a checkpoint cannot be used."""
    warn_no_effect(f"plans of an earlier run have no effect, and batches are planned again: {error}")


def warn_of_mismatches(reason: str, times: int) -> None:
    """Once it has become many times."""
    if times == _MANY_MISMATCHES:
        warn_no_effect(
            f"{times} batches were planned again because {reason}, which takes longer than a step: the model takes "
            "another path from step to step (dropped layers, branches on values or on the step's number). Keep it "
            "on one path, or give a budget that the plain step fits into",
            every_rank=True,
        )


def warn_of_whole(reason: str) -> None:
    """Before a batch that showed more than those before, which ran in sub-batches."""
    warn_no_effect(f"batches of this shape run whole from here on, with another plan: {reason}", every_rank=True)


def warn_of_no_plan(error: Exception) -> None:
    """Before a batch that must not be split any more, and that other ranks wait for."""
    warn_no_effect(
        "this batch computes something else than the planned batch, and has no plan on this rank. As the "
        f"other ranks wait for its gradients, it runs whole, outside of its budget; training ends before the next: "
        f"{error}",
        every_rank=True,
    )


def warn_of_unexamined() -> None:
    """Warn at the end, if no batch came after one that took another path, with which it could have been examined."""
    warn_difference(
        "the last batch of its shape computed something else than the planned batch, and it is not known whether its "
        "sub-batches gave its gradient: train on, which examines it, or compare with a run without a budget",
        every_rank=True,
    )


def warn_of_paths(certificate: Certificate, paths: GraphPaths, stopped: bool) -> None:
    """After sub-batches that took another path than those before were examined.

    Args:
        stopped: nothing of that batch has gone backward.
    """
    if not certificate.separable:
        since, late, warn = "the last batch", " That batch ran in sub-batches all the same;", warn_difference
        if stopped:
            since, late, warn = "this batch", " It runs again;", warn_no_effect
        warn(
            f"from {since} on the step computes something else than the planned batch, and its sub-batches "
            f"no longer give the batch's gradient: {certificate.reason}.{late} from here on there is another plan",
            every_rank=True,
        )
    elif paths.many:
        warn_difference(
            f"the step takes another path through the model from batch to batch. {paths.examined + 1} were examined, "
            "and their sub-batches gave the batch's gradient; other paths are assumed to do the same",
            every_rank=True,
        )
