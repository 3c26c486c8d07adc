"""What is said when batches, or the path that they take through the model, change while training goes on."""

from __future__ import annotations

from typing import Literal, get_args

from retime.foundations.no_effect import warn_difference, warn_no_effect
from retime.foundations.parts import Certificate
from retime.mechanisms.memory_budget.step.graph_paths import GraphPaths

__all__ = [
    "OnShapeChange",
    "check_on_shape_change",
    "warn_of_dropped",
    "warn_of_mismatches",
    "warn_of_no_plan",
    "warn_of_paths",
    "warn_of_unexamined",
    "warn_of_whole",
    "why_anew",
]

OnShapeChange = Literal["replan", "error"]
_MANY_MISMATCHES = 3


def check_on_shape_change(choice: str) -> None:
    """Raise a ValueError for an unknown choice."""
    if choice not in get_args(OnShapeChange):
        raise ValueError(f"on_shape_change={choice!r}: use 'replan' or 'error'")


def why_anew(samples: int, same_shape: bool) -> str:
    """With ``on_shape_change="error"``: what is wrong about a batch."""
    if same_shape:
        return (
            "layers were frozen, thawed or put into another mode, gradients now stay from batch to batch, or samples "
            "are larger, so the plan no longer holds, and on_shape_change='error': use on_shape_change='replan'"
        )
    return (
        f"a batch of {samples} samples has another shape than the one that was planned for, and "
        "on_shape_change='error': bring all batches to one shape, or use on_shape_change='replan'"
    )


def warn_of_dropped(error: Exception) -> None:
    """Plans that came with a checkpoint cannot be used."""
    warn_no_effect(f"plans of an earlier run have no effect, and batches are planned for anew: {error}")


def warn_of_mismatches(reason: str, times: int) -> None:
    """Once it has become many times."""
    if times == _MANY_MISMATCHES:
        warn_no_effect(
            f"{times} batches were planned anew because {reason}, which takes longer than a step: the model takes "
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
        "this batch computes something else than the one that was planned for, and has no plan on this rank. As the "
        f"other ranks wait for its gradients, it runs whole, outside of its budget; training ends before the next: "
        f"{error}",
        every_rank=True,
    )


def warn_of_unexamined() -> None:
    """At the end, if no batch came after one that took another path, with which it could have been examined."""
    warn_difference(
        "the last batch of its shape computed something else than the one that was planned for, and whether its "
        "sub-batches gave its gradient is not known: examine it by training on, or compare with a run without a budget",
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
            since, late, warn = "this batch", " It runs anew;", warn_no_effect
        warn(
            f"from {since} on the step computes something else than the one that was planned for, and its sub-batches "
            f"no longer give the batch's gradient: {certificate.reason}.{late} from here on there is another plan",
            every_rank=True,
        )
    elif paths.many:
        warn_difference(
            f"the step takes another path through the model from batch to batch. {paths.examined + 1} were examined, "
            "and their sub-batches gave the batch's gradient; others are taken for alike from here on",
            every_rank=True,
        )
