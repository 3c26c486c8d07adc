"""Epochs without a backward pass under a memory budget, as weight averaging has one for its BatchNorm layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torchmetrics.classification import MulticlassAccuracy

from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import (
    BATCH,
    CLASSES,
    OFFLOAD_LATER,
    SHALLOW,
    ShallowNet,
    assert_same,
    assert_way,
    fit,
    norm,
    report_of,
)
from support.memory_budget_looks import Looks

pytestmark = support.IGNORED


class Counts(ShallowNet):
    """Counts samples, and logs."""

    def __init__(self, norm: Any = None) -> None:
        super().__init__(norm)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}


class Outputs(Callback):
    """Keeps what callbacks are shown."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


def trained(strategy: Any, module: Counts, *callbacks: Callback, epochs: int) -> tuple[Trainer, list[Any]]:
    logger = support.Notes()
    done = fit(module, strategy, callbacks=list(callbacks), logger=logger, max_epochs=epochs)
    return done, logger.lines


@OFFLOAD_LATER
def test_all_parts_run_and_are_logged(way: str) -> None:
    plain, ours = Counts(), Counts()
    shown = [Outputs(), Outputs()]
    _, expected = trained("auto", plain, Looks(), shown[0], epochs=3)
    done, logged = trained(MemoryBudgetStrategy(SHALLOW), ours, Looks(), shown[1], epochs=3)
    assert_way(report_of(done), way)
    assert_same(plain, ours, way)
    assert ours.seen == plain.seen == 3 * 3 * BATCH
    assert len(logged) == len(expected)
    for left, right in zip(expected, logged, strict=True):
        assert right == pytest.approx(left, rel=2e-5)
    for left, right in zip(shown[0].outputs, shown[1].outputs, strict=True):
        assert right["logits"].shape == left["logits"].shape
        assert float(right["loss"]) == pytest.approx(float(left["loss"]), rel=2e-5)


def test_averaged_weights_have_their_statistics(offloads: None) -> None:
    plain, ours = Counts(norm), Counts(norm)
    lines = []
    for module, strategy in ((plain, "auto"), (ours, MemoryBudgetStrategy(110_000))):
        averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        lines.append(trained(strategy, module, averaging, epochs=2)[1])
    assert_same(plain, ours, "offload")
    assert ours.seen == plain.seen == 3 * 3 * BATCH
    assert lines[1] == lines[0]
