"""Swapped optimizers of a strategy leave no old one alive; the update on the host where it has no use."""

import gc
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from retime import CPUAccumulateStrategy, NoEffectWarning
from retime.strategies import FusedOptimizerStrategy
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = IGNORED_WARNINGS


class Swap(Callback):
    def __init__(self) -> None:
        self.gone: list[weakref.ref[Any]] = []
        self.alive: list[bool] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.gone = [weakref.ref(optimizer) for optimizer in trainer.strategy.optimizers]
            trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.1)]
        if batch_idx == 4:
            gc.collect()
            self.alive = [reference() is not None for reference in self.gone]


class Model(BoringModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_a_swapped_optimizer_is_let_go_and_its_counts_stay(mode: str) -> None:
    strategy, swap = FusedOptimizerStrategy(mode), Swap()
    trainer = quiet_trainer(strategy=strategy, max_steps=6, limit_val_batches=0, callbacks=[swap])
    trainer.fit(Model())
    assert swap.alive == [False]
    report = strategy.report()
    assert report.steps == 6
    assert report.fused_updates + report.late_updates == 6 * 2


def test_one_process_has_no_updates_to_divide() -> None:
    trainer = quiet_trainer(strategy=CPUAccumulateStrategy(update_on_host=True), max_steps=2, limit_val_batches=0)
    with pytest.warns(
        NoEffectWarning, match="with one process there are no gradients to add up and no updates to divide"
    ):
        trainer.fit(BoringModel())
    assert trainer.global_step == 2


def test_devices_are_refused(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUAccumulateStrategy, "root_device", torch.device("cuda:0"))
    strategy = CPUAccumulateStrategy(update_on_host=True)
    strategy.model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="update_on_host=True is for processors, not for cuda:0"):
        strategy.register_hooks()
