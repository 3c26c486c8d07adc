"""Cases that Lightning's own test suite brought up, against the plain strategy."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

import retime
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = [
    *IGNORED_WARNINGS,
    pytest.mark.filterwarnings("ignore::retime.DifferenceWarning"),
    pytest.mark.filterwarnings("ignore::retime.NoEffectWarning"),
    pytest.mark.filterwarnings("ignore:Swapping scheduler"),
]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 16), batch_size=4)


class KeepsGradients(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@retime.declare_per_parameter
class Scaled(torch.optim.SGD):
    """Takes an argument beside the closure."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["lr"] * scale)
        return loss


class FurtherArguments(Net):
    def configure_optimizers(self) -> Any:
        return Scaled(self.parameters(), lr=0.1)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure, scale=0.1)


def weights(module: type[Net], strategy: str, averaging: bool) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    net = module()
    callbacks = [StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)] if averaging else []
    quiet_trainer(strategy=strategy, max_epochs=3, callbacks=callbacks).fit(net)
    return net.state_dict()


@pytest.mark.parametrize("strategy", ["fused_optimizer", "fused_optimizer_forward"])
@pytest.mark.parametrize(("module", "averaging"), [(Net, True), (KeepsGradients, False), (FurtherArguments, False)])
def test_equals_the_plain_strategy(module: type[Net], averaging: bool, strategy: str) -> None:
    plain, ours = weights(module, "auto", averaging), weights(module, strategy, averaging)
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
