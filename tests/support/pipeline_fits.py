"""Fits that run under a plain Trainer and over the ranks of a pipeline, and what of them is compared."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from retime import OOOPipelineStrategy
from retime.mechanisms.pipeline import DeferredInitModel
from support.pipeline_models import transformer
from support.trainers import quiet_trainer

FEATURES, CLASSES = 12, 3


class Classifier(LightningModule):
    """A plain module, as anybody would write it."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 32
        between = nn.BatchNorm1d(width) if batch_norm else nn.Tanh()
        self.net: nn.Module = nn.Sequential(
            nn.Linear(FEATURES, width), between, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
        )
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.validated = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = self.net(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"largest": logits.detach().max()}, reduce_fx="max")
        return {"loss": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.validated(logits, batch[1])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", self.validated)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.2, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Unlisted(nn.Module):
    """Layers that are attributes, with functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.first = nn.Linear(32, CLASSES), nn.Linear(FEATURES, 32)
        self.norm, self.second = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(inputs)))
        return self.out(torch.relu(self.second(x)))


class LanguageModel(LightningModule):
    """An unmodified GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, _, _ = transformer("gpt2")
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch[0], labels=batch[0]).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class OnMeta(LanguageModel):
    """Built on the meta device, as models are that do not fit on one rank."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.model = None  # type: ignore[assignment]
        self.seen: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model, _, _ = transformer("gpt2")


def loader(kind: str = "classes") -> DataLoader[Any]:
    """46 samples in batches of 10: the last one is smaller."""
    drawn = torch.Generator().manual_seed(1)
    if kind == "tokens":
        return DataLoader(TensorDataset(torch.randint(0, 101, (22, 10), generator=drawn)), batch_size=8)
    inputs, labels = torch.randn(46, FEATURES, generator=drawn), torch.randint(0, CLASSES, (46,), generator=drawn)
    return DataLoader(TensorDataset(inputs, labels), batch_size=10)


def trainer(strategy: Any, folder: Path, **options: Any) -> Trainer:
    """On processors, quiet."""
    given = {"devices": "auto", "use_distributed_sampler": False, "default_root_dir": folder, "max_epochs": 2}
    return quiet_trainer(strategy=strategy, **given | options)


def outcome(module: Any, fit: Trainer) -> dict[str, Any]:
    """What is compared."""
    weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
    metrics = {key: float(value) for key, value in fit.callback_metrics.items()}
    return {"weights": weights, "metrics": metrics, "seen": list(module.seen), "steps": fit.global_step}


def fitted(
    make: Callable[[], Any], strategy: Any, folder: Path, devices: int, *, kind: str = "classes", **options: Any
) -> dict[str, Any]:
    """The outcome of a fit with a validation."""
    module, fit = make(), trainer(strategy, folder, devices=devices, **options)
    fit.fit(module, loader(kind), loader(kind))
    return outcome(module, fit)


def without_a_list(strategy: Any, folder: Path, devices: int) -> dict[str, Any]:
    module = Classifier()
    module.net = Unlisted()
    if not isinstance(strategy, str):
        strategy = OOOPipelineStrategy(layers="auto", microbatches=3)
    return fitted(lambda: module, strategy, folder, devices)


def _frozen_behind() -> Classifier:
    module = Classifier()
    for layer in list(module.net)[1:]:
        layer.requires_grad_(False)
    return module


class _Reset(Classifier):
    """Layers get new weights in the middle of an epoch, and draw random numbers in each."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 1:
            torch.manual_seed(5)
            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
            first, last = self.net[0], self.net[-1]
            with torch.no_grad():
                first.weight.normal_()
                nn.init.xavier_normal_(first.weight)
                torch.rand(first.weight.shape, out=first.weight.data).mul_(0.1)
                nn.init.orthogonal_(first.weight)
                last.bias.uniform_(-0.1, 0.1)
                last.weight.data[1:].normal_(std=0.1)
            self.seen.append(float(torch.rand(())))


def callbacks(strategy: Any, folder: Path, devices: int) -> dict[str, Any]:
    """Checkpoints, early stopping and monitors, which read what is logged."""
    module = Classifier()
    saves = ModelCheckpoint(folder / f"best{devices}", monitor="val_loss", save_top_k=1, mode="max")
    stops = EarlyStopping("loss_epoch", patience=1, mode="max")
    logging = {"logger": CSVLogger(folder / f"csv{devices}"), "log_every_n_steps": 1, "enable_checkpointing": True}
    kept = [saves, stops, LearningRateMonitor()]
    fit = trainer(strategy, folder, devices=devices, max_epochs=6, callbacks=kept, **logging)
    fit.fit(module, loader(), loader())
    return outcome(module, fit) | {"best": float(saves.best_model_score or 0), "epochs": fit.current_epoch}


def saved_behind(strategy: Any, folder: Path, devices: int) -> dict[str, Any]:
    """One epoch, a checkpoint that is saved behind the fit, and another epoch from it."""
    half = trainer(strategy, folder, devices=devices, max_epochs=1)
    half.fit(Classifier(), loader(), loader())
    path = folder / f"behind{devices}.ckpt"
    half.save_checkpoint(path)
    module, fit = Classifier(), trainer(again(strategy), folder, devices=devices)
    fit.fit(module, loader(), loader(), ckpt_path=path)
    return outcome(module, fit)


class Returns(Classifier):
    """Returns more than its loss, which a hook looks at; and looks at the loss that is about to be differentiated."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self.net(batch[0])
        right = (logits.argmax(-1) == batch[1]).double().mean()
        loss = nn.functional.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits, "right": right, "kind": "whole"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["kind"] == "whole"
        assert len(outputs["logits"]) == len(batch[1])
        self.seen += [float(outputs["loss"]), float(outputs["right"]), float(outputs["logits"].sum())]

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(float(loss))


def on_meta(strategy: Any, folder: Path, devices: int) -> dict[str, Any]:
    """Half of it from a checkpoint; the last one has the whole model."""
    path, outcomes = None, []
    for epochs in (1, 2):
        torch.manual_seed(5)
        module = OnMeta()
        if devices == 1:
            module.configure_model()
            DeferredInitModel(module, torch.device("cpu"), 5).fill(module)
        saves = ModelCheckpoint(folder / f"meta{devices}{epochs}", save_last=True)
        fit = trainer(
            again(strategy), folder, devices=devices, max_epochs=epochs, callbacks=[saves], enable_checkpointing=True
        )
        fit.fit(module, loader("tokens"), loader("tokens"), ckpt_path=path)
        path = saves.last_model_path
        outcomes += module.seen
    module.seen = outcomes
    path = folder / f"meta{devices}.ckpt"
    fit.save_checkpoint(path)
    return outcome(module, fit) | {"weights": torch.load(path, weights_only=False)["state_dict"]}


def afterwards(strategy: Any, folder: Path, devices: int) -> dict[str, Any]:
    """After the fit the module is whole."""
    module = Classifier()
    fit = trainer(strategy, folder, devices=devices, limit_val_batches=0)
    fit.fit(module, loader())
    fitted = outcome(module, fit)
    (tested,) = fit.test(module, loader(), verbose=False)
    predicted = fit.predict(module, loader())
    return fitted | {"tested": tested, "predicted": torch.cat(predicted)}  # type: ignore[arg-type]


FITS: dict[str, Callable[[Any, Path, int], dict[str, Any]]] = {
    "plain_fit": partial(fitted, Classifier),
    "without_a_list": without_a_list,
    "callbacks": callbacks,
    "saved_behind": saved_behind,
    "language_model": partial(fitted, LanguageModel, kind="tokens"),
    "on_meta": on_meta,
    "afterwards": afterwards,
    # with a loader whose order Lightning is left to divide
    "outputs": partial(fitted, Returns, accumulate_grad_batches=2, use_distributed_sampler=True),
    # the last rank has no gradients, and clips
    "frozen_behind": partial(fitted, _frozen_behind, gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "reset_between": partial(fitted, _Reset),
}


def again(strategy: Any) -> Any:
    """One more of the same."""
    return strategy if isinstance(strategy, str) else OOOPipelineStrategy(schedule="1f1b", microbatches=3)
