"""Batches of many shapes under a memory budget: one plan a shape, as many as are kept, and a word about each."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import retime.mechanisms.memory_budget.plans as plan_book
from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.memory_budget.report import BudgetReport, PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import (
    CLASSES,
    FEATURES,
    OFFLOAD_LATER,
    Net,
    assert_close,
    assert_same,
    fit,
    fit_both,
    report_of,
)

pytestmark = support.IGNORED
DEPTH, BUDGET = 3, 95_000  # the plain step needs 120,000 bytes, offloading 75,000


class Sequences(Net):
    """A shallow one: what is counted here is plans, and each takes a while to make."""

    def __init__(self) -> None:
        super().__init__(depth=DEPTH)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).mean(1), batch[1])


def sequences(*shapes: tuple[int, int]) -> Any:
    """Batches of (samples, time steps)."""
    generator = torch.Generator().manual_seed(2)
    return DataLoader(
        [
            (torch.randn(samples, steps, FEATURES, generator=generator), torch.arange(samples) % CLASSES)
            for samples, steps in shapes
        ],  # type: ignore[arg-type]
        batch_size=None,
    )


# Two shapes, and a larger batch of the first.
SIZES = [(120, 2), (128, 2), (100, 2), (32, 8), (17, 8)]


@OFFLOAD_LATER
def test_one_plan_a_shape(way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")  # the contract's runs make it quiet
    plain, ours, report = fit_both(Sequences, BUDGET, sequences(*SIZES), max_epochs=2)
    assert (report.plans, report.replanned, report.steps) == (3, {}, 10)
    assert [shape.samples for shape in report.shapes] == [120, 128, 32]
    said = [line for line in caplog.messages if "retime: planning a batch of" in line]
    assert len(said) == 3
    assert sum("predicted peak" in line for line in caplog.messages if "memory budget" not in line) == 3
    assert_same(plain, ours, way)


def test_only_so_many_plans_are_kept_and_no_batches(offloads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_book, "MOST_PLANS", 2)
    plain, ours = Sequences(), Sequences()
    shapes = [(128, 2), (64, 4), (128, 2), (32, 8), (128, 2), (64, 4)]  # the third one makes the second one go
    fit(plain, data=sequences(*shapes))
    runner = support.trainer(MemoryBudgetStrategy(BUDGET))
    sizes: list[tuple[int, int, int]] = []

    def note(self: Any, *arguments: Any, **options: Any) -> Any:
        step = runner.strategy._step
        held = sum(len(list(offload.keep)) for offload in step._offloads._of.values())
        sizes.append((len(step._plans.book), len(step._offloads), held))
        return real(self, *arguments, **options)

    real = Sequences.on_train_batch_end
    monkeypatch.setattr(Sequences, "on_train_batch_end", note)
    runner.fit(ours, sequences(*shapes))
    report = report_of(runner)
    assert report.plans == 4
    assert len(report.shapes) == 2
    plans, offloads, held = zip(*sizes, strict=True)
    assert (max(plans), max(offloads)) == (2, 2)
    assert held == (0,) * 6, "a batch is not held longer than its step"
    assert report.offload.passes == 6, "counts of plans that went are kept"
    assert_close(plain, ours, 0)


def test_another_shape_is_refused_on_request(splits: None) -> None:
    ours, plain = Sequences(), Sequences()
    fit(plain, data=sequences((128, 2), (90, 2)))
    with pytest.raises(ScheduleError, match="on_shape_change='error': bring all batches to one shape"):
        fit(ours, MemoryBudgetStrategy(BUDGET, on_shape_change="error"), data=sequences((128, 2), (90, 2), (64, 4)))
    assert_close(plain, ours)  # smaller batches of a shape are no other shape


class Drops(Net):
    """Leaves layers out in every second batch."""

    def __init__(self) -> None:
        super().__init__(depth=DEPTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = batch[0]
        for layer in self.net[:5] if batch_idx % 2 else self.net[:-1]:
            value = layer(value)
        return F.cross_entropy(self.net[-1](value), batch[1])


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_model_that_takes_another_way_each_time_is_warned_of(offloads: None) -> None:
    with pytest.warns(NoEffectWarning, match="3 batches were planned again .* from step to step") as caught:
        plain, ours, report = fit_both(Drops, BUDGET, support.loader(9))
    assert sum("planned again" in str(one.message) for one in caught) == 1
    assert sum(report.replanned.values()) >= 3
    assert_close(plain, ours, 0)


def test_a_long_report_is_short() -> None:
    report = BudgetReport(1000)
    shape = PlannedShape(8, PlanChoice(OffloadPlan(8), 0, 900, 1.0, 1.0, 0, 0))
    for _ in range(300):
        report.note(shape, 128)
    assert (report.plans, len(report.shapes)) == (300, 128)
    report.shapes = [replace(shape, samples=8 + number) for number, shape in enumerate(report.shapes)]
    assert len(str(report).splitlines()) <= 15
    assert "more lines: report().to_dict() has all" in str(report)
    assert report.to_dict()["plans"] == 300
