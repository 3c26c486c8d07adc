"""What is logged under a memory budget equals what the plain strategy logs, metrics included."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision
from torchmetrics.regression import MeanSquaredError, R2Score
from torchmetrics.wrappers import ClasswiseWrapper, Running

from retime.foundations.messages import DifferenceWarning
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import (
    CLASSES,
    OFFLOAD_LATER,
    SHALLOW,
    SMALL,
    Net,
    ShallowNet,
    assert_close,
    assert_same,
    assert_way,
    fit,
    loader,
    report_of,
)

pytestmark = support.IGNORED


class Logs(ShallowNet):
    """Logs numbers in many ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("sum", (logits.argmax(1) == batch[1]).sum().float(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("epoch", loss.detach().square() * 0 + logits.detach().mean(), on_step=False, on_epoch=True)
        self.log("constant", 3.0, True, False)
        self.log_dict({"a": loss, "b": logits.detach().sum()}, on_step=True, on_epoch=True)
        return loss


class Measured(ShallowNet):
    """Logs torchmetrics objects; ``large`` makes their arguments too big to be kept for a batch."""

    def __init__(self, large: bool = False) -> None:
        super().__init__()
        self.net, self.large = Net().net if large else self.net, large
        self.f1 = MulticlassF1Score(CLASSES)
        self.logged_value = MulticlassPrecision(CLASSES)
        self.updated = MulticlassAccuracy(CLASSES)
        self.mean = MeanMetric()
        self.largest = MaxMetric()
        self.recent = Running(MeanMetric(), window=2)
        self.each = ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))
        self.some = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)], prefix="some_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        guess = logits.softmax(1)
        if self.large:
            guess, target = guess.repeat_interleave(6, 0), batch[1].repeat_interleave(6, 0)
        else:
            guess, target = guess.argmax(1), batch[1]
        self.f1(guess, target)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.log("precision", self.logged_value(guess, target), on_step=True)
        self.updated.update(guess, target)
        self.log("accuracy", self.updated, on_step=False, on_epoch=True)
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.largest(loss)
        self.log("largest", self.largest, on_step=True, on_epoch=True)
        self.recent(loss)
        self.log("recent", self.recent, on_step=True, on_epoch=True)
        self.log_dict(self.each(guess, target), on_step=True)
        self.some(guess, target)
        self.log_dict(self.some, on_step=True, on_epoch=True)
        return loss


def assert_same_lines(make: Any, way: str, budget: int = SHALLOW, **options: Any) -> Any:
    """Every row of the logger has the same names and numbers; so have the weights. Returns what was trained."""
    rows = []
    metrics = []
    modules = [make(), make()]
    for module, strategy in zip(modules, ("auto", MemoryBudgetStrategy(budget)), strict=True):
        logger = support.Notes()
        done = fit(module, strategy, data=loader(2, extra=19), logger=logger, max_epochs=2, **options)
        rows.append(logger.lines)
        metrics.append(dict(done.callback_metrics))
    report = report_of(done)
    assert_way(report, way)
    assert (len(report.shapes), report.replanned) == (1, {})  # real steps save what the dry run said
    assert_same(*modules, way)
    plain, ours = rows
    assert [set(row) for row in ours] == [set(row) for row in plain]
    for left, right in zip(plain, ours, strict=True):
        assert right == pytest.approx(left, rel=2e-5, abs=1e-6)
    assert {name: float(value) for name, value in metrics[1].items()} == pytest.approx(
        {name: float(value) for name, value in metrics[0].items()}, rel=2e-5, abs=1e-6
    )
    return modules[1]


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.long), 2])
@OFFLOAD_LATER
def test_numbers(way: str, accumulated: int) -> None:
    assert_same_lines(Logs, way, accumulate_grad_batches=accumulated)


LARGE_LATER = pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.long)])


@LARGE_LATER
@OFFLOAD_LATER
def test_metrics(way: str, large: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        module = assert_same_lines(lambda: Measured(large), way, SMALL if large else SHALLOW)
    assert "forward" not in module.f1.__dict__, "metrics are left as they were made"
    assert torch.equal(module.f1(torch.arange(4), torch.arange(4)), torch.tensor(1.0))


class LearnsFromMetrics(ShallowNet):
    """Its loss is a metric's value; a correlation of few samples has none."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.net, self.large = Net().net if large else self.net, large
        self.error = MeanSquaredError()
        self.r2 = R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        guess = self.net(batch[0])
        target = F.one_hot(batch[1], CLASSES).float()
        if self.large:
            guess, target = guess.repeat(1, 6), target.repeat(1, 6)
        loss = self.error(guess, target)
        self.log("r2", self.r2(guess[:, 0], target[:, 0]), on_step=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        return loss


@LARGE_LATER
@OFFLOAD_LATER
def test_a_metric_as_the_loss(way: str, large: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        assert_same_lines(lambda: LearnsFromMetrics(large), way, SMALL + 40_000 if large else SHALLOW)


class Nonlinear(ShallowNet):
    """Logs a number of the batch that no sum of its parts' numbers gives."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.log("spread", logits.detach().std(), on_step=True)
        return F.cross_entropy(logits, batch[1])


class AlikeAtFirst(ShallowNet):
    """Logs many functions of a batch whose samples have nearly, or with 0 exactly, the same losses at the start."""

    def __init__(self, std: float) -> None:
        super().__init__()
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        nn.init.normal_(last.weight, std=std)
        nn.init.zeros_(last.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        loss, chances = losses.mean(), logits.softmax(1)
        right = {"loss": loss, "accuracy": (logits.argmax(1) == batch[1]).float().mean(), "constant": 0.5}
        wrong = {"perplexity": loss.exp(), "rms": losses.square().mean().sqrt()}
        wrong |= {"ratio": chances[:, 0].sum() / chances[:, 1].sum(), "largest": losses.max()}
        wrong |= {"spread": logits.detach().std()}
        self.log_dict(right | wrong)
        for name in ("max", "min", "sum"):
            self.log(name, getattr(losses, name)(), reduce_fx=name)
        return loss


@pytest.mark.parametrize("std", [0.02, pytest.param(0.0, marks=pytest.mark.long)])
def test_what_only_looks_like_a_mean_at_the_start_is_named_and_nothing_else(splits: None, std: float) -> None:
    lines, said = [], []
    for strategy in ("auto", MemoryBudgetStrategy(SHALLOW)):
        notes = support.Notes()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DifferenceWarning)
            run = fit(AlikeAtFirst(std), strategy, logger=notes)
        lines.append(notes.lines)
        said += [str(one.message) for one in caught if one.category is DifferenceWarning]
    assert_way(report_of(run), "sub-batches")
    names = ("largest", "perplexity", "ratio", "rms", "spread")
    assert len(said) == len(names), said
    for name, text in zip(names, said, strict=True):
        assert f"the logged value {name!r} is the mean over sub-batches" in text
    for plain, ours in zip(*lines, strict=True):
        for name in ("loss", "max", "min", "sum"):
            assert ours[name] == pytest.approx(plain[name], rel=1e-5), name


def test_they_are_named_before_the_first_step(splits: None) -> None:
    """Whoever makes errors of warnings, or stops a run that warns, has trained nothing."""
    module, seen = Nonlinear(), support.Steps()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DifferenceWarning)
        with pytest.raises(DifferenceWarning, match="'spread'"):
            fit(module, MemoryBudgetStrategy(SHALLOW), callbacks=[seen])
    assert seen.steps == 0
    assert_close(Nonlinear(), module, 0)
