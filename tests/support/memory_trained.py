"""Trains a small step plainly and under a budget that splits each batch as far as its certificate lets it."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retime.mechanisms.memory_budget import BudgetedStep, HostMemory
from retime.mechanisms.memory_budget.planner import StepPlanner
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.schedules.budget import OffloadPlan

__all__ = ["Trained", "trained"]

_HOLDS = 2**30
_SUB_BATCH = 3


class Trained:
    """What training gave.

    Attributes:
        weights: afterwards.
        split: whether batches ran in sub-batches.
        reason: why they did not.
    """

    def __init__(self, weights: Tensor, split: bool = False, reason: str = "") -> None:
        self.weights, self.split, self.reason = weights, split, reason

    def differs_from(self, other: "Trained") -> float:
        """The largest relative difference of weights."""
        return float(((self.weights - other.weights).abs() / (1e-3 + other.weights.abs())).max())


def trained(
    loss: Callable[[Any, Any], Any],
    model: nn.Module,
    batches: Sequence[Any],
    budgeted: bool,
    change: Callable[[nn.Module, int], None] = lambda model, step: None,
    sub_batch: int = _SUB_BATCH,
) -> Trained:
    """One optimizer step a batch; the model given is left alone.

    Args:
        loss: the training step, of a model and a batch.
        change: what is done to the model before each batch but the first.
        sub_batch: the most samples of a part.
    """
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        return loss(model, batch)

    reasons: list[str] = []
    budget = None
    if budgeted:
        budget = BudgetedStep(
            model, [optimizer], _HOLDS, HostMemory("cpu"), make_plan=partial(_plan, reasons, sub_batch)
        )
    for number, batch in enumerate(batches):
        if number:
            change(model, number)
        optimizer.zero_grad()
        torch.manual_seed(number)
        if budget is None:
            output = step(batch)
            (output["loss"] if isinstance(output, dict) else output).backward()
        else:
            budget.run(step, batch)
        optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    if budget is None:
        return Trained(weights)
    report = budget.report()
    budget.remove()
    return Trained(weights, report.sub_batches > report.steps, "; ".join(reasons))


def _plan(
    reasons: list[str], sub_batch: int, planner: StepPlanner, step: Any, batch: Any, samples: int
) -> PlannedShape:
    certificate = planner.certify(step, batch)
    if not certificate.separable:
        reasons.append(certificate.reason)
    plan = OffloadPlan(sub_batch if certificate.separable else samples)
    choice = PlanChoice(plan, 0, 0, 1, 1, 0, 0, tensor_bytes=_HOLDS)
    return PlannedShape(samples, choice, certificate if certificate.separable else None)
