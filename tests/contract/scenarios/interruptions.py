"""Runs that end early: exceptions, Ctrl-C, early stopping, a step limit."""

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint

from contract.bench import Bench
from contract.models import Net, sgd
from contract.registry import fits, scenario


class PlannedError(Exception):
    """Raised by a scenario on purpose, in epoch 1: by then a mechanism that first watches a step is at work."""


class RaisesInStep(Net):
    error: type[BaseException] = PlannedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 1:
            raise self.error
        return super().training_step(batch, batch_idx)


class RaisesAfterBatch(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            raise PlannedError


class RaisesInValidation(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1:
            raise PlannedError


class Interrupts(RaisesInStep):
    error = KeyboardInterrupt


class KeepsOnException(Callback):
    """Reads weights and optimizer state where an exception is handled."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.seen["weights"] = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.seen["checkpoint"] = trainer._checkpoint_connector.dump_checkpoint()["optimizer_states"]


def _crash(
    bench: Bench, module: Net, *callbacks: Callback, error: type[BaseException] = PlannedError, **kwargs: Any
) -> None:
    saver, keeper = OnExceptionCheckpoint(bench.folder), KeepsOnException()
    with warnings.catch_warnings():
        # Given for every fit with this callback: Lightning looks for a checkpoint of an earlier exception.
        warnings.filterwarnings("ignore", message=".*(was called without a model|there is no last checkpoint)")
        with pytest.raises(error):
            bench.fit(module, callbacks=[*callbacks, keeper, saver], enable_checkpointing=True, **kwargs)
    bench.keep("seen", keeper.seen)
    bench.keep("checkpoint", torch.load(bench.folder / "on_exception.ckpt", weights_only=False))


fits(
    exception_in_training_step=lambda bench: _crash(bench, RaisesInStep()),
    exception_inside_a_window=lambda bench: _crash(bench, RaisesInStep(optimizer=sgd), accumulate_grad_batches=2),
    exception_after_a_batch=lambda bench: _crash(bench, Net(), RaisesAfterBatch()),
    exception_in_validation=lambda bench: _crash(
        bench, RaisesInValidation(), val=bench.loader(batches=1), val_check_interval=2
    ),
)


@scenario(single="Lightning kills the other ranks on Ctrl-C")
def keyboard_interrupt(bench: Bench) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        _crash(bench, Interrupts(), error=SystemExit)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning leaves Ctrl-C ignored


@scenario()
def fit_after_an_exception(bench: Bench) -> None:
    """A user catches the exception in a notebook and trains the same module again."""
    module = RaisesInStep()
    with pytest.raises(PlannedError):
        bench.fit(module)
    bench.fit(module, max_epochs=1)


def _each_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "newest", every_n_train_steps=1, enable_version_counter=False)


@scenario()
def resume_after_an_exception(bench: Bench) -> None:
    with pytest.raises(PlannedError):
        bench.fit(RaisesInStep(), callbacks=[_each_step(bench.folder)], enable_checkpointing=True)
    path = bench.folder / "newest.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists")  # on purpose: it goes on there
        bench.fit(Net(), callbacks=[_each_step(bench.folder)], enable_checkpointing=True, ckpt_path=path)


@scenario()
def early_stopping_on_train_loss(bench: Bench) -> None:
    stopper = EarlyStopping("train_loss", min_delta=0.05, patience=1, check_on_train_epoch_end=True)
    bench.fit(Net(), callbacks=[stopper], max_epochs=6)
    bench.keep("stopper", stopper.state_dict())


@scenario()
def early_stopping_on_validation(bench: Bench) -> None:
    stopper = EarlyStopping("val_loss", min_delta=0.05, patience=1)
    bench.fit(Net(), callbacks=[stopper], val=bench.loader(batches=2), max_epochs=6, val_check_interval=2)
    bench.keep("stopper", stopper.state_dict())


class StopsAfterBatch(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 1


fits(stopped_by_a_callback=lambda bench: bench.fit(Net(), callbacks=[StopsAfterBatch()]))
