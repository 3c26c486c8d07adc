"""Fits whose losses look like a mean over samples at first: weights are the plain fit's, or it is told.

And what steps whose batches run in parts log, count, return, draw and write: the whole batch's, or it is told.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

import retime.mechanisms.memory_budget.planner as step_planner
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.foundations.parts.combine import Certificate, Count, Weighting
from retime.mechanisms.memory_budget import BudgetedStep, HostMemory
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.sub_batches import SubBatches
from support.memory_budget import (
    BATCH,
    CLASSES,
    FEATURES,
    IGNORED,
    SHALLOW,
    WIDTH,
    Notes,
    Outputs,
    ShallowNet,
    assert_close,
    fit_both,
    loader,
)

pytestmark = IGNORED


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
        self.other, self.least = nn.Linear(FEATURES, WIDTH), -9.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.least = 0.0 if batch_idx else -9.0

    def loss(self, batch: Any) -> Tensor:
        first = self.net[0] if batch[0].mean() > self.least else self.other
        return F.cross_entropy(self.net[1:](first(batch[0])), batch[1])


@pytest.mark.parametrize("kind", [Weighted, Hard, Branches])
def test_batches_stay_whole_where_parts_could_differ(splits: None, kind: type[ShallowNet]) -> None:
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


def test_values_that_are_logged_keep_no_batch_whole(splits: None) -> None:
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
def test_another_weighting_from_some_batch_on_is_told_and_right_at_once(
    splits: None, kind: type[ShallowNet], batches: int
) -> None:
    with pytest.warns(NoEffectWarning, match=r"from this batch on .* no longer give the batch's gradient"):
        plain, ours, report = fit_both(kind, SHALLOW, loader(batches))
    assert_close(plain, ours)
    assert report.steps == batches


def test_small_batches_of_few_classes_leave_nothing_open() -> None:
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(FEATURES, 10)
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


def test_a_batch_whose_weights_stay_open_runs_whole(splits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = Weighting("count", Count("batch[1]", "sum"))
    open_weights = Certificate(Weighting("mean"), alternatives=(labels,), samples=2, sizes=frozenset(range(1000)))
    monkeypatch.setattr(step_planner, "certify", lambda *_, **__: open_weights)
    with pytest.warns(NoEffectWarning, match=r"run whole from here on.*mean over samples and a mean over sum\(batch"):
        plain, ours, report = fit_both(ShallowNet, SHALLOW)
    assert report.sub_batches == report.steps
    assert_close(plain, ours, 0)


def both(make: Callable[[], Any], budget: Any = SHALLOW, data: Any = None, *, split: bool = True) -> tuple[Any, Any]:
    """Outputs of a plain fit and of one under a budget, of the same weights."""
    callback = Outputs()
    plain, ours, report = fit_both(make, budget, data, callbacks=[callback])
    assert_close(plain, ours)
    assert (report.sub_batches > report.steps) is split
    half = len(callback.outputs) // 2
    return callback.outputs[:half], callback.outputs[half:]


class Sized(ShallowNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss


def test_a_mean_over_labels_is_logged_as_one_whatever_its_batch_size(splits: None) -> None:
    (inputs, labels), notes = loader(2).dataset.tensors, Notes()
    labels[BATCH + BATCH // 4 :] = -100  # from the second batch on, so that the first one is a mean over samples too
    data = DataLoader(TensorDataset(inputs, labels), batch_size=BATCH)
    fit_both(Sized, SHALLOW, data, logger=notes)
    plain, ours = notes.lines[: len(notes.lines) // 2], notes.lines[len(notes.lines) // 2 :]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in plain])


class Seen(Metric):
    """Counts samples."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("n", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.n += len(values)

    def compute(self) -> Tensor:
        return self.n


class Later(ShallowNet):
    """A term of the loss that begins in the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.samples = Seen(), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.metric.update(logits.detach().repeat(1, 8))
        self.samples += len(logits)
        return F.cross_entropy(logits, batch[1]) + (0.1 * logits.square().mean() if batch_idx else 0)


def test_a_part_that_is_run_again_counts_once(splits: None) -> None:
    with pytest.warns(NoEffectWarning, match="mean over samples now, and was a"):
        _, ours, report = fit_both(Later, SHALLOW)
    assert report.sub_batches > report.steps
    assert (int(ours.metric.n), ours.samples) == (3 * BATCH, 3 * BATCH)


class Vector(ShallowNet):
    """Its loss has the shape (1,)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0])[:, :1] - batch[1][:, None]).square().mean(0)


def test_a_loss_of_one_entry_keeps_its_shape(splits: None) -> None:
    plain, ours = both(Vector)
    torch.testing.assert_close([one["loss"] for one in ours], [one["loss"] for one in plain])


class Lists(ShallowNet):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self.net(batch[0])
        rows = [{"row": row[: 1 + label]} for row, label in zip(logits.detach(), batch[1].tolist(), strict=True)]
        return {"loss": F.cross_entropy(logits, batch[1]), "rows": rows, "array": logits.detach().numpy()}


@pytest.mark.parametrize("samples", [BATCH, BATCH - 6])
def test_lists_and_arrays_of_one_entry_a_sample_are_joined(splits: None, samples: int) -> None:
    (plain,), (ours,) = both(Lists, data=loader(1, batch=samples))
    torch.testing.assert_close(ours["rows"], plain["rows"])
    np.testing.assert_allclose(ours["array"], plain["array"], rtol=1e-5, atol=1e-6)


class Pairs(ShallowNet):
    def loss(self, batch: Any) -> Tensor:
        one, two = self.net(batch[0].view(len(batch[0]) // 2, 2, -1)).unbind(1)
        return (one - two).square().mean() + F.cross_entropy(one, batch[1][::2])


def test_a_step_that_runs_on_even_numbers_only_stays_whole(splits: None) -> None:
    both(Pairs, split=False)


DRAWS: dict[str, Callable[[], float]] = {
    "Python's random": random.random,
    "NumPy": np.random.rand,
    "torch's rand": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("drawn", DRAWS)
def test_numbers_drawn_for_a_whole_batch_are_told(splits: None, drawn: str) -> None:
    class Draws(ShallowNet):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0] * DRAWS[drawn]()), batch[1])

    with pytest.warns(DifferenceWarning, match=f"draws its own random numbers by .*{drawn}"):
        fit_both(Draws, SHALLOW)


def rows(samples: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(FEATURES), "y": torch.tensor(index % CLASSES)} for index in range(samples)]


class Named(ShallowNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


class Puts(Named):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["logits"] = self.net(batch["x"])
        return F.cross_entropy(batch["logits"], batch.pop("y"))


def test_what_a_step_puts_into_its_batch_is_told(splits: None) -> None:
    with pytest.warns(DifferenceWarning, match=r"what it puts into it \(\['logits'\]\) is not there afterwards"):
        fit_both(Puts, SHALLOW, DataLoader(rows(BATCH), batch_size=BATCH))


def test_numbers_as_many_as_samples_matter_only_where_a_batch_is_cut() -> None:
    def collate(some: Any) -> dict[str, Any]:
        return {**torch.utils.data.default_collate(some), "size": (224, 224)}

    both(Named, "1GiB", DataLoader(rows(10), batch_size=8, collate_fn=collate), split=False)


def test_batches_that_are_never_cut_may_be_of_any_kind() -> None:
    net = nn.Linear(4, 4)
    batch = {"x": torch.randn(3, 4), "labels": [{"boxes": torch.randn(n, 4)} for n in (1, 4, 2)]}

    def step(given: Any) -> Any:
        pairs = zip(net(given["x"]), given["labels"], strict=True)
        return sum((row - one["boxes"]).square().mean() for row, one in pairs)

    budget = BudgetedStep(net, [torch.optim.SGD(net.parameters())], "1GiB", HostMemory("cpu"), sub_batches=False)
    with budget.offloading(step, batch):
        step(batch).backward()
    budget.remove()
    assert net.weight.grad is not None
