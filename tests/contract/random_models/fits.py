"""Random models in a Trainer: the same spec as a LightningModule, and a fit under any strategy."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from contract.random_models.layers import Batch
from contract.random_models.losses import loss_of
from contract.random_models.model import batches, build
from contract.random_models.spec import Spec
from contract.random_models.training import (
    CLIP_NORM,
    CLIP_VALUE,
    Between,
    Order,
    Way,
    as_given,
    make_optimizer,
    make_schedule,
)
from contract.record import snapshot
from support.quiet import only_errors_logged
from support.trainers import quiet_trainer


class Module(LightningModule):
    """The spec's model, loss, optimizer and schedule."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.net, self.spec = build(spec), spec

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, self.spec.training.loss, batch)
        self.log("loss", loss)
        if self.spec.training.logs:
            self._log_more(loss, Batch(*batch))
        return loss

    def _log_more(self, loss: Tensor, batch: Batch) -> None:
        """Means, sums, a maximum, and what is none of these; some of it without operations that lead to it."""
        read = torch.tensor(loss.item(), dtype=loss.dtype)
        self.log_dict({"half": loss.detach() / 2, "read": read, "samples": float(len(batch.inputs)), "rate": 0.1})
        self.log_dict({"mean": batch.target.mean(), "total": batch.target.sum(), "pairs": batch.target.sum() / 2})
        if self.spec.training.loss == "sum":
            self.log("each", loss.detach() / len(batch.inputs))
        self.log("largest", batch.target.max(), reduce_fx="max")
        self.log("marked", batch.mask.sum(), reduce_fx="sum")
        self.log_dict({"power": (0.1 * loss).exp(), "read_power": math.exp(min(9.0, 0.1 * loss.item()))})
        marked = (batch.target[..., 0] * batch.mask).sum()
        self.log_dict({"root": loss.detach().abs().sqrt(), "share": marked / batch.mask.sum().clamp(min=1)})

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.net, self.spec.training)
        schedule = make_schedule(optimizer, self.spec.training)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ZeroingModule(Module):
    """Zeroes gradients in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Watcher(Callback):
    """Keeps losses, and does between two steps what the spec says."""

    def __init__(self, spec: Spec, left: dict[str, Any], way: Way) -> None:
        self.spec, self.left, self.way = spec, left, way
        self.between: Between | None = None

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.net.at_step(batch_idx // self.spec.training.accumulate)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.between is None:
            self.between = Between(module.net, trainer.optimizers[0], self.left["seen"])
        self.left["losses"].append(snapshot(outputs["loss"]))
        if self.spec.training.logs:
            self.left["shown"].append(snapshot(dict(trainer.callback_metrics)))
        step, part = divmod(batch_idx, self.spec.training.accumulate)
        if part < self.spec.training.accumulate - 1:
            return
        self.way.steps = step + 1
        for when, name in self.spec.training.between:
            if when == step:
                getattr(self.between, name)()


class GradientWatcher(Callback):
    """Keeps gradients too."""

    def __init__(self, left: dict[str, Any]) -> None:
        self.left = left

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self.left["gradients"].append({name: snapshot(p.grad) for name, p in module.net.named_parameters()})


class Fit(Way):
    """A fit under a strategy.

    Args:
        strategy: makes the strategy.
        did: from the trainer: whether the mechanism was on.
        callbacks: makes further callbacks.

    Attributes:
        rank, ranks: of how many processes this is which.
    """

    rank, ranks = 0, 1

    def __init__(
        self,
        strategy: Callable[[Spec], Any] = lambda spec: "auto",
        did: Callable[[Trainer], bool] = lambda trainer: False,
        callbacks: Callable[[], list[Callback]] = list,
    ) -> None:
        self.strategy, self.did, self.callbacks = strategy, did, callbacks

    def done(self, trainer: Trainer) -> None:
        """After a fit that was begun: note what the mechanism did."""
        self.on = self.did(trainer)
        report = getattr(trainer.strategy, "report", None)
        self.note = "" if self.on or report is None else str(report())

    @only_errors_logged()
    def fit(self, spec: Spec, order: Order = as_given, strategy: Any = None) -> dict[str, Any]:
        """Train; returns what is left behind."""
        training = spec.training
        module = (Module if training.to_none else ZeroingModule)(spec)
        self.model = module.net
        left: dict[str, Any] = {"losses": [], "gradients": [], "seen": [], "shown": []}
        callbacks = [Watcher(spec, left, self), *self.callbacks()]
        if training.reads_gradients:
            callbacks.append(GradientWatcher(left))
        trainer = quiet_trainer(
            devices=self.ranks,
            strategy=self.strategy(spec) if strategy is None else strategy,
            callbacks=callbacks,
            max_epochs=1,
            accumulate_grad_batches=training.accumulate,
            gradient_clip_val={"value": CLIP_VALUE, "norm": CLIP_NORM}.get(training.clip),
            gradient_clip_algorithm=training.clip or None,
            precision="bf16-mixed" if training.autocast else "32-true",
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
        torch.manual_seed(spec.seed + 1)
        try:
            given = [Batch(*map(order, batch)) for batch in batches(spec, self.rank)]
            trainer.fit(module, DataLoader(given, batch_size=None))
        finally:
            self.done(trainer)
        return left | snapshot(
            {
                "weights": dict(module.net.state_dict()),
                "optimizer": trainer.optimizers[0].state_dict(),
                "logged": dict(trainer.callback_metrics),
            }
        )


def counted(name: str) -> Callable[[Trainer], bool]:
    """For `Fit.did`: whether the report of the trainer's strategy counts any of these."""

    def did(trainer: Trainer) -> bool:
        report = trainer.strategy.report()
        return report is not None and getattr(report, name) > 0

    return did


def train_fit(spec: Spec, way: Way, order: Order = as_given) -> dict[str, Any]:
    """For `Mechanism.train`; a `Way` that is no `Fit` stands for Lightning's own strategy."""
    return (way if isinstance(way, Fit) else Fit()).fit(spec, order)
