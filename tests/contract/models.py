"""The modules that scenarios train: tiny, and each notes its loss and learning rates as it goes.

`B` batch, `X` features.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
FEATURES = 6

Optimizer = torch.optim.Optimizer


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES))


def sines(samples: int, batch_size: int = 2) -> DataLoader[Any]:
    inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=batch_size)


class Net(LightningModule):
    """A regression on [B, X], with the pieces that scenarios exchange.

    Args:
        net: maps [B, X] to [B, X].
        optimizer: from parameters to optimizer.
        schedule: from optimizer to Lightning's scheduler config.
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[[Any], Optimizer] = adam,
        schedule: Callable[[Optimizer], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.net = mlp() if net is None else net
        self.make_optimizer = optimizer
        self.make_schedule = schedule
        self.trace: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def note(self, **values: Any) -> None:
        """Keep values of this batch, without a hook that a mechanism could take for a reader of the weights."""
        rates = [float(group["lr"]) for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        self.trace.append({"lr": rates, **{name: value.detach().clone() for name, value in values.items()}})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.note(loss=loss)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = self.make_optimizer(trained)
        if self.make_schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_schedule(optimizer)}
