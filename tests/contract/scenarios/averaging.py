"""Averages of the weights: everything that reads them between two batches."""

from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from contract.bench import Bench
from contract.models import Net, mlp, sgd
from contract.registry import fits, scenario
from contract.traits import ALIASES


class HomeMadeEMA(Callback):
    """Holds the parameters from fit start on, so nothing announces that it is about to read them."""

    def hold(self, parameter: Tensor) -> Tensor:
        return parameter

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.held = [self.hold(parameter) for parameter in pl_module.parameters()]
        self.average = [held.detach().clone() for held in self.held]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, held in zip(self.average, self.held, strict=True):
            average.lerp_(held.detach(), 0.1)


class AliasEMA(HomeMadeEMA):
    """Averages through `.data` aliases taken at fit start: no torch function sees the parameters again."""

    def hold(self, parameter: Tensor) -> Tensor:
        return parameter.data


class EpochSnapshots(Callback):
    """Copies the weights when an epoch has ended, through storage pointers it took at fit start."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.storages = [parameter.data for parameter in pl_module.parameters()]
        self.copies: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.copies.append([storage.clone() for storage in self.storages])


class TargetNetwork(Net):
    """Follows its own weights with a second copy, updated in training_step as reinforcement learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.target = mlp().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return super().training_step([batch[0], self.target(batch[0])], batch_idx)


def _averaged(bench: Bench, module: Net, callback: HomeMadeEMA, **kwargs: Any) -> None:
    bench.fit(module, callbacks=[callback], **kwargs)
    bench.keep("average", callback.average)


fits(
    ema_of_lightning=lambda bench: bench.fit(
        Net(), callbacks=[EMAWeightAveraging(decay=0.5)], val=bench.loader(batches=1), accumulate_grad_batches=2
    ),
    averaging_of_lightning=lambda bench: bench.fit(
        Net(optimizer=sgd), callbacks=[WeightAveraging()], val=bench.loader(batches=1), max_epochs=3
    ),
    stochastic_weight_averaging=lambda bench: bench.fit(
        Net(optimizer=sgd),
        callbacks=[StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)],
        max_epochs=4,
    ),
    ema_home_made=lambda bench: _averaged(bench, Net(), HomeMadeEMA(), accumulate_grad_batches=2),
    ema_home_made_every_batch=lambda bench: _averaged(bench, Net(optimizer=sgd), HomeMadeEMA()),
    target_network=lambda bench: bench.fit(TargetNetwork()),
)

fits(ALIASES, ema_through_aliases=lambda bench: _averaged(bench, Net(), AliasEMA()))


@scenario(ALIASES)
def weights_copied_at_epoch_end(bench: Bench) -> None:
    callback = EpochSnapshots()
    bench.fit(Net(), callbacks=[callback])
    bench.keep("copies", callback.copies)
