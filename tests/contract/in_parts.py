"""A memory budget's riskiest way, forced: each batch that its certificate lets be split runs in two uneven parts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from retime.foundations.parts.split import Split, part_of, samples_in, split_batch
from retime.mechanisms.memory_budget import BudgetedStep, BudgetOptions, sub_batches
from retime.mechanisms.memory_budget.planner import StepPlanner
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.schedules.budget import OffloadPlan
from retime.strategies import MemoryBudgetDDPStrategy, MemoryBudgetStrategy
from retime.strategies.support.budgeted_steps import Budgeted

PARTS = 2


def uneven_parts(batch: Any, sub_batch: int, split: Split = split_batch) -> list[Any]:
    """All samples but one, and the last: equal parts would not show whether each has its own weight."""
    samples = samples_in(batch, split)
    if sub_batch >= samples:
        return [batch]
    return [part_of(batch, slice(0, samples - 1), samples), part_of(batch, slice(samples - 1, samples), samples)]


class _InParts(Budgeted):
    """Splits every batch of two samples or more, as no budget of these small models would ask for.

    What `training_step` notes is noted once a part; :func:`folded` puts it together, so that traces can be compared.
    """

    def setup(self, trainer: Trainer) -> None:
        self.whole_because: dict[str, int] = {}
        self._noted = self._begun = self._samples = 0
        super().setup(trainer)

    def _make_step(self, module: LightningModule, options: BudgetOptions) -> BudgetedStep:
        return super()._make_step(module, replace(options, make_plan=self._in_parts))  # type: ignore[safe-super]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is None:
            return super().training_step(*args, **kwargs)
        self._noted, self._begun = len(self._trace()), step.report().sub_batches
        self._samples = samples_in(args[0], self.options.split)
        with patch.object(sub_batches, "balanced_parts", uneven_parts):
            output = super().training_step(*args, **kwargs)
        if step.parts is None:
            self._fold()
        return output

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(*args, **kwargs)
        self._fold()
        return loss

    def teardown(self) -> None:
        super().teardown()
        report = self.report()
        if report is not None and any(shape.choice.plan.sub_batch < shape.samples for shape in report.shapes):
            assert report.sub_batches > report.steps or not report.steps, f"nothing was split: {report}"

    def activity(self) -> Any:
        """As a `report()` in the table: how many parts there were beside the first, and why batches stayed whole."""
        report = self.report()
        more = 0 if report is None else report.sub_batches - report.steps
        return SimpleNamespace(fused_updates=more, plain_steps=self.whole_because)

    def _in_parts(self, planner: StepPlanner, step: Any, batch: Any, samples: int) -> PlannedShape:
        """What the planner does, with its real certificate, but for the search."""
        certificate = planner.certify(step, batch) if samples > 1 else None
        if certificate is None or not certificate.separable:
            because = "one sample" if certificate is None else certificate.reason
            self.whole_because[because] = self.whole_because.get(because, 0) + 1
            return _planned(samples, samples)
        return _planned(samples, samples - 1, certificate)

    def _trace(self) -> list[Any]:
        trace = getattr(self.lightning_module, "trace", None)
        return trace if trace is not None else []

    def _fold(self) -> None:
        if self._step is not None and self._step.report().sub_batches - self._begun == PARTS:
            trace = self._trace()
            trace[self._noted :] = folded(trace[self._noted :], self._samples)


def _planned(samples: int, sub_batch: int, certificate: Any = None) -> PlannedShape:
    choice = PlanChoice(OffloadPlan(sub_batch), 0, 0, 1, 1, 0, 0)
    return PlannedShape(samples, choice, certificate)


def folded(entries: list[Any], samples: int) -> list[Any]:
    """A trace as for the whole batch: of what each part noted, means by samples, and what is the same in all parts."""
    alike: dict[tuple[str, ...], list[Any]] = {}
    for entry in entries:
        alike.setdefault(_names(entry), []).append(entry)
    left: list[Any] = []
    for names, noted in alike.items():
        each, rest = divmod(len(noted), PARTS)
        merge = names and not rest
        left += [_mean(*two, samples) for two in zip(noted, noted[each:], strict=False)] if merge else noted
    return left


def _names(entry: Any) -> tuple[str, ...]:
    return tuple(entry) if isinstance(entry, dict) else ()


def _mean(first: dict[str, Any], last: dict[str, Any], samples: int) -> dict[str, Any]:
    return {name: _mean_of(value, last[name], samples) for name, value in first.items()}


def _mean_of(first: Any, last: Any, samples: int) -> Any:
    if isinstance(first, Tensor):
        same = first.shape == last.shape and torch.equal(first, last)
        return first if same or first.dim() else ((samples - 1) * first.double() + last.double()).div(samples).to(first)
    if isinstance(first, float):
        return first if first == last else ((samples - 1) * first + last) / samples
    return first


class SplitsEverything(_InParts, MemoryBudgetStrategy):
    """On one device."""


class SplitsEverythingOnAllRanks(_InParts, MemoryBudgetDDPStrategy):
    """With DDP."""
