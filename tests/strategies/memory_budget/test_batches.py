"""Batches of many kinds and shapes under a memory budget, steps that write into them, and accumulation over them."""

import logging
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
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
    BATCH,
    CLASSES,
    FEATURES,
    OFFLOAD_LATER,
    SHALLOW,
    Net,
    ShallowNet,
    assert_close,
    assert_same,
    assert_way,
    fit,
    fit_both,
    loader,
    report_of,
)

pytestmark = support.IGNORED

BUDGET = 110_000


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str = "train"


class Graph:
    """An object that nothing can be known of but by a hook."""

    def __init__(self, *values: Tensor) -> None:
        self.held = {"x": [*values[:-1]], "y": values[-1]}


def many_kinds(a: Tensor, b: Tensor, c: Tensor, y: Tensor) -> Any:
    """Features in a nested dict, a dataclass and a mapping of its own."""
    nested = {"in": {"x": a, "mask": None, "split": "train"}, "out": [(y, ["name"] * len(y))], "epoch": 3}
    return nested, Frozen(b), UserDict(x=c)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], list[Tensor]]]] = {
    "known": (many_kinds, lambda batch: [batch[0]["in"]["x"], batch[1].x, batch[2]["x"], batch[0]["out"][0][0]]),
    "object": (Graph, lambda batch: [*batch.held["x"], batch.held["y"]]),
}


def cut(batch: Graph, sub_batch: int) -> list[Graph]:
    return [Graph(*part) for part in zip(*(v.split(sub_batch) for v in KINDS["object"][1](batch)), strict=True)]


class Writes(ShallowNet):
    """Writes into its batch, as preprocessing on the device may, and into values where autograd allows it."""

    def __init__(self, get: Callable[[Any], list[Tensor]]) -> None:
        super().__init__()
        self.get = get

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        *parts, y = self.get(batch)
        for part in parts:
            part.sub_(0.2).mul_(1.1)
        y.remainder_(3)
        value = self.net[0](torch.cat(parts, 1))
        value.mul_(1.5)  # before something is saved
        for layer in self.net[1:-1]:
            value = layer(value)
        first = value.exp()  # saved by exp
        second = first * 2  # saves nothing of them
        second += 1
        second.sigmoid_()
        unused = value.exp()
        unused.mul_(3)  # no gradient needs it
        return F.cross_entropy(self.net[-1](second), y)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *(("offload", "known"), ("sub-batches", "known"), ("sub-batches", "object")),
        pytest.param("offload", "object", marks=pytest.mark.long),
    ],
    indirect=["way"],
)
def test_a_step_may_write_into_its_batch_and_where_autograd_allows_it(way: str, kind: str) -> None:
    """Dry runs and probes write into copies: the batch that is trained with is the one that came."""
    make, get = KINDS[kind]

    def data() -> Any:
        extra = 0 if kind == "object" else 19  # nothing tells that a smaller object is of the same shape
        batches = [make(*(part.clone() for part in x.split([4, 4, 8], 1)), y.clone()) for x, y in loader(2, extra)]
        return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    plain, ours = Writes(get), Writes(get)
    fit(plain, data=data())
    # what the step makes of its labels, those to be ignored perhaps, cannot be counted from the batch
    options: dict[str, Any] = {"loss_weight": lambda part: len(get(part)[-1])}
    if kind == "object":
        options["split_batch"] = cut
    done = fit(ours, MemoryBudgetStrategy(BUDGET, **options), data=data())
    report = report_of(done)
    assert_way(report, way)
    # the batch counts, and its storages stay, whatever holds them
    assert report.shapes[0].choice.peak_bytes == {"offload": 106_344, "sub-batches": 84_272}[way]
    assert_same(plain, ours, way)


class Edits(ShallowNet):
    """In batch 1, writes into what was saved in the forward pass: some that left, or some that stayed."""

    def __init__(self, layer: int, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = batch[0]
        for number, layer in enumerate(self.net):
            value = layer(value)
            if number == self.layer:
                saved = value
        if batch_idx == 1:
            with torch.no_grad():
                self.change(saved)
        return F.cross_entropy(value, batch[1])


FIRST, LAST = 2, 8  # layers whose outputs are saved
INSIDE = {"itself": lambda t: t.mul_(2), "view": lambda t: t.T[3, 5:9].zero_()}


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        *((FIRST, "view"), (LAST, "itself")),
        pytest.param(FIRST, "itself", marks=pytest.mark.long),
        pytest.param(LAST, "view", marks=pytest.mark.long),
    ],
)
def test_edits_of_saved_tensors_are_refused(offloads: None, layer: int, change: str) -> None:
    """PyTorch leaves this check to saved-tensor hooks."""
    plain, ours = ShallowNet(), Edits(layer, INSIDE[change])
    fit(plain, limit_train_batches=1)
    runner = support.trainer(MemoryBudgetStrategy(SHALLOW))
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        runner.fit(ours, loader(3))
    plan = report_of(runner).shapes[0].choice.plan
    assert 0 < len(plan.offload) < plan.saved, "the first layers' outputs leave, the last ones' stay"
    assert_close(plain, ours, 0)  # as after batch 0


DEPTH, SHAPED = 3, 95_000  # the plain step needs 120,000 bytes, offloading 75,000


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
    plain, ours, report = fit_both(Sequences, SHAPED, sequences(*SIZES), max_epochs=2)
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
    runner = support.trainer(MemoryBudgetStrategy(SHAPED))
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
        fit(ours, MemoryBudgetStrategy(SHAPED, on_shape_change="error"), data=sequences((128, 2), (90, 2), (64, 4)))
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
        plain, ours, report = fit_both(Drops, SHAPED, support.loader(9))
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


class Skips(ShallowNet):
    """A mean over the samples that count; notes how many graphs are still there when a part begins."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[StorageWeakRef] = []
        self.graphs: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.graphs.append(sum(not saved.expired() for saved in self.saved))
        output = self.net(batch[0]).tanh()  # tanh saves it
        self.saved.append(StorageWeakRef(output.untyped_storage()))
        return F.cross_entropy(output + 0, batch[1], ignore_index=-100)


def late() -> DataLoader[Any]:
    """After the batch that is probed only the last samples count: a first part has nothing to learn from."""
    torch.manual_seed(0)
    batches = []
    for ignored in (slice(1, None, 3), slice(0, -40), slice(0, -20)):
        labels = torch.randint(CLASSES, (BATCH,))
        labels[ignored] = -100
        batches.append((torch.randn(BATCH, FEATURES), labels))
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_first_part_without_a_loss(splits: None, accumulated: int) -> None:
    plain, ours, report = fit_both(Skips, SHALLOW, late(), accumulate_grad_batches=accumulated)
    assert report.sub_batches > report.steps == 3
    assert_close(plain, ours)
    assert not any(ours.graphs)


class AccumulatesLater(Callback):
    """Lightning's own GradientAccumulationScheduler can be asked before the fit; this one cannot."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = [1, 3, 1][trainer.current_epoch]


def test_accumulation_that_begins_later(offloads: None) -> None:
    """From then on gradients are there all the time, which takes another plan; the first one holds again afterwards."""
    plain, ours, report = fit_both(ShallowNet, SHALLOW, callbacks=[AccumulatesLater()], max_epochs=3)
    assert_close(plain, ours, 0)
    choices = [shape.choice for shape in report.shapes]
    always = fit(ShallowNet(), MemoryBudgetStrategy(SHALLOW), accumulate_grad_batches=3)
    (expected,) = (shape.choice for shape in report_of(always).shapes)
    assert len(choices) == 2
    assert (choices[1].plan, choices[1].peak_bytes) == (expected.plan, expected.peak_bytes)
    assert (choices[0].plan, choices[0].peak_bytes) != (expected.plan, expected.peak_bytes)
