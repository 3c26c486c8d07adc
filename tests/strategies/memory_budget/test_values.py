"""Fits whose losses look like a mean over samples at first: weights are the plain fit's, or it is told."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import retime.mechanisms.memory_budget.planner as step_planner
from retime.foundations.messages import NoEffectWarning
from retime.foundations.parts.combine import Certificate, Count, Weighting
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.sub_batches import SubBatches
from support.memory_budget import CLASSES, FEATURES, IGNORED, SHALLOW, WIDTH, ShallowNet, assert_close, fit_both, loader

pytestmark = [*IGNORED, pytest.mark.usefixtures("splits")]


class Weighted(ShallowNet):
    """Classes weigh the same until the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_weights", torch.ones(CLASSES))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.class_weights.copy_(torch.linspace(0.2, 3, CLASSES))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=self.class_weights)


class Hard(ShallowNet):
    """A mean over the samples that are learned worst: all of them, at first."""

    least = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.least = 1.2 if batch_idx else 0.0

    def loss(self, batch: Any) -> Tensor:
        each = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        hard = (each > self.least).float()
        return (each * hard).sum() / hard.sum().clamp(min=1)


class Branches(ShallowNet):
    """The batch's values choose one of two layers of the same kind."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.least = torch.nn.Linear(FEATURES, WIDTH), -9.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.least = 0.0 if batch_idx else -9.0

    def loss(self, batch: Any) -> Tensor:
        first = self.net[0] if batch[0].mean() > self.least else self.other
        return F.cross_entropy(self.net[1:](first(batch[0])), batch[1])


@pytest.mark.parametrize("kind", [Weighted, Hard, Branches])
def test_batches_stay_whole_where_parts_could_differ(kind: type[ShallowNet]) -> None:
    plain, ours, report = fit_both(kind, SHALLOW)
    assert report.sub_batches == report.steps
    assert_close(plain, ours, 0)


class Logs(ShallowNet):
    """Reads values, which decide nothing."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.log("loss", loss.item())
        assert loss.item() < 1e6
        return loss


def test_values_that_are_logged_keep_no_batch_whole() -> None:
    plain, ours, report = fit_both(Logs, SHALLOW)
    assert report.sub_batches > report.steps
    assert_close(plain, ours)


class Ignores(ShallowNet):
    """From the second batch on a class is ignored."""

    ignored = -100

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ignored = 0 if batch_idx else -100

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=self.ignored)


class Skips(Ignores):
    """The same, by a comparison of its own."""

    def loss(self, batch: Any) -> Tensor:
        there = batch[1] != self.ignored
        each = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return (each * there).sum() / there.sum()


class Sums(Ignores):
    """A mean at first, and then a sum."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum" if self.ignored == 0 else "mean") / 300


class Weighs(Ignores):
    """No weights of classes at first."""

    def loss(self, batch: Any) -> Tensor:
        weight = torch.tensor([0.1, 1.0, 5.0, 0.5]) if self.ignored == 0 else None
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=weight)


@pytest.mark.parametrize(
    ("kind", "batches"),
    [(Ignores, 3), (Sums, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((Skips, 3), (Weighs, 2)))],
)
def test_another_weighting_from_some_batch_on_is_told_and_right_at_once(kind: type[ShallowNet], batches: int) -> None:
    with pytest.warns(NoEffectWarning, match=r"from this batch on .* no longer give the batch's gradient"):
        plain, ours, report = fit_both(kind, SHALLOW, loader(batches))
    assert_close(plain, ours)
    assert report.steps == batches


def test_small_batches_of_few_classes_leave_nothing_open() -> None:
    generator = torch.Generator().manual_seed(0)
    net = torch.nn.Linear(FEATURES, 10)
    certificate = None
    for number in range(40):
        samples, classes = 4 + number % 2, (3, 10)[number // 2 % 2]
        inputs = torch.randn(samples, FEATURES, generator=generator)
        batch = inputs, torch.randint(classes, (samples,), generator=generator)
        if number % 8 == 0:
            certificate = certify(lambda part: F.cross_entropy(net(part[0]), part[1]), batch, net)
        assert certificate is not None
        parts = SubBatches(net, lambda part: F.cross_entropy(net(part[0]), part[1]), batch, 2, certificate)
        assert parts.certificate == certificate
        assert parts.weights == pytest.approx([size / samples for size in parts.samples])


def test_a_batch_whose_weights_stay_open_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = Weighting("count", Count("batch[1]", "sum"))
    open_weights = Certificate(Weighting("mean"), alternatives=(labels,), samples=2, sizes=frozenset(range(1000)))
    monkeypatch.setattr(step_planner, "certify", lambda *_, **__: open_weights)
    with pytest.warns(NoEffectWarning, match=r"run whole from here on.*mean over samples and a mean over sum\(batch"):
        plain, ours, report = fit_both(ShallowNet, SHALLOW)
    assert report.sub_batches == report.steps
    assert_close(plain, ours, 0)
