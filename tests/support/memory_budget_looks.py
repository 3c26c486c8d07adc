"""A callback for the tests of the memory budget: an epoch in which batches only pass forward."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class Looks(Callback):
    """The second epoch trains nothing; weight averaging has such a one for BatchNorm's statistics."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        looks = trainer.current_epoch == 1
        trainer.fit_loop._skip_backward = looks
        trainer.accumulate_grad_batches = 99 if looks else 1  # no optimizer step
