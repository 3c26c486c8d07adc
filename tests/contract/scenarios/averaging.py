"""Averages of the weights: everything that reads them between two batches."""

from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from contract.bench import Bench
from contract.models import Net, sgd
from contract.registry import scenario
from contract.traits import ALIASES


class HomeMadeEMA(Callback):
    """Holds the parameters from fit start on, so nothing announces that it is about to read them."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.parameters = list(pl_module.parameters())
        self.average = [parameter.detach().clone() for parameter in self.parameters]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.lerp_(parameter.detach(), 0.1)


class EpochSnapshots(Callback):
    """Copies the weights when an epoch has ended, through storage pointers it took at fit start."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.storages = [parameter.data for parameter in pl_module.parameters()]
        self.copies: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.copies.append([storage.clone() for storage in self.storages])


@scenario()
def ema_of_lightning(bench: Bench) -> None:
    callback = EMAWeightAveraging(decay=0.5)
    bench.fit(Net(), callbacks=[callback], val=bench.loader(batches=1), accumulate_grad_batches=2)


@scenario()
def averaging_of_lightning(bench: Bench) -> None:
    bench.fit(Net(optimizer=sgd), callbacks=[WeightAveraging()], val=bench.loader(batches=1), max_epochs=3)


@scenario()
def stochastic_weight_averaging(bench: Bench) -> None:
    callback = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)
    bench.fit(Net(optimizer=sgd), callbacks=[callback], max_epochs=4)


@scenario()
def ema_home_made(bench: Bench) -> None:
    callback = HomeMadeEMA()
    bench.fit(Net(), callbacks=[callback], accumulate_grad_batches=2)
    bench.keep("average", callback.average)


@scenario()
def ema_home_made_every_batch(bench: Bench) -> None:
    callback = HomeMadeEMA()
    bench.fit(Net(optimizer=sgd), callbacks=[callback])
    bench.keep("average", callback.average)


@scenario(ALIASES)
def weights_copied_at_epoch_end(bench: Bench) -> None:
    callback = EpochSnapshots()
    bench.fit(Net(), callbacks=[callback])
    bench.keep("copies", callback.copies)


class TargetNetwork(Net):
    """Follows its own weights with a second copy, updated in training_step as reinforcement learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.nn.Sequential(*[torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)])
        self.target.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return super().training_step([batch[0], self.target(batch[0])], batch_idx)


@scenario()
def target_network(bench: Bench) -> None:
    bench.fit(TargetNetwork())
