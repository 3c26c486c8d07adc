"""The update on the host where it is nothing for; what it does on ranks is in the contract table."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from retime import CPUAccumulateStrategy, NoEffectWarning
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = IGNORED_WARNINGS


def test_one_process_has_no_updates_to_divide() -> None:
    trainer = quiet_trainer(strategy=CPUAccumulateStrategy(update_on_host=True), max_steps=2, limit_val_batches=0)
    with pytest.warns(
        NoEffectWarning, match="with one process there are no gradients to add up and no updates to divide"
    ):
        trainer.fit(BoringModel())
    assert trainer.global_step == 2


def test_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(CPUAccumulateStrategy, "root_device", torch.device("cuda:0"))
    strategy = CPUAccumulateStrategy(update_on_host=True)
    strategy.model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="update_on_host=True is for processors, not for cuda:0"):
        strategy.register_hooks()
