"""Gradient accumulation, clipping, and steps that are left out."""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from contract.models import Net, sgd
from contract.registry import fits
from contract.traits import NORM_CLIP

NONE_ACROSS_RANKS = "Lightning refuses a training_step that returns None across ranks"


class ChangeAccumulation(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.accumulate_grad_batches = 1 if batch_idx < 2 else 2


fits(
    # a window of 3, then one of 2
    accumulate_with_short_last_window=lambda bench: bench.fit(
        Net(), loader=bench.loader(batches=5), accumulate_grad_batches=3
    ),
    accumulate_longer_than_the_epoch=lambda bench: bench.fit(Net(), accumulate_grad_batches=8),
    accumulate_by_epoch=lambda bench: bench.fit(
        Net(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], max_epochs=3
    ),
    accumulation_changes_mid_epoch=lambda bench: bench.fit(
        Net(optimizer=sgd), loader=bench.loader(batches=5), callbacks=[ChangeAccumulation()]
    ),
    accumulation_cut_by_max_steps=lambda bench: bench.fit(Net(), accumulate_grad_batches=2, max_steps=3, max_epochs=3),
    clip_by_value=lambda bench: bench.fit(Net(), gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    clip_by_value_with_accumulation=lambda bench: bench.fit(
        Net(optimizer=sgd), gradient_clip_val=0.01, gradient_clip_algorithm="value", accumulate_grad_batches=2
    ),
)


fits(
    NORM_CLIP,
    clip_by_norm=lambda bench: bench.fit(Net(optimizer=sgd), gradient_clip_val=0.05),
    clip_by_norm_with_accumulation=lambda bench: bench.fit(Net(), gradient_clip_val=0.05, accumulate_grad_batches=2),
)


class Skips(Net):
    """Returns None for some batches: no backward, yet the step is still called."""

    def __init__(self, *skipped: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.skipped else loss


fits(
    single=NONE_ACROSS_RANKS,
    training_step_returns_none=lambda bench: bench.fit(Skips(1, 2), loader=bench.loader(batches=5)),
    training_step_returns_none_at_the_ends=lambda bench: bench.fit(Skips(0, 2, optimizer=sgd)),
    # A window's last batch has no backward, but the gradients of the batches before it are stepped.
    none_on_the_stepping_batch=lambda bench: bench.fit(
        Skips(1, 2), loader=bench.loader(batches=5), accumulate_grad_batches=2
    ),
    none_inside_a_window=lambda bench: bench.fit(
        Skips(1, 2), loader=bench.loader(batches=5), accumulate_grad_batches=3
    ),
    none_on_the_stepping_batch_with_value_clipping=lambda bench: bench.fit(
        Skips(1, 2),
        loader=bench.loader(batches=5),
        accumulate_grad_batches=3,
        gradient_clip_val=0.01,
        gradient_clip_algorithm="value",
    ),
)
