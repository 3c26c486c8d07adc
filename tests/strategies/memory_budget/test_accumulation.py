"""Gradients that are accumulated over batches, when batches run in parts or plans have to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import BATCH, CLASSES, FEATURES, SHALLOW, ShallowNet, assert_close, fit, fit_both, report_of

pytestmark = support.IGNORED


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
