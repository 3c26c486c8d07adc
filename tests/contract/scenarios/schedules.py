"""Learning rates that move: by step, by epoch, by a metric, or by hand."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim import lr_scheduler

from contract.bench import Bench
from contract.models import Net, Optimizer, sgd
from contract.registry import add, fits, scenario


def _by(interval: str, make: Any, **config: Any) -> Any:
    return lambda optimizer: {"scheduler": make(optimizer), "interval": interval, **config}


def _one_cycle(optimizer: Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)  # also cycles momentum or beta1


def _halve(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def _warm_then_decay(optimizer: Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    return lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[3])


SCHEDULES = {
    "step_by_step": _by("step", _halve),
    "step_by_epoch": _by("epoch", _halve),
    "every_other_step": _by("step", _halve, frequency=2),
    "cosine_by_step": _by("step", partial(lr_scheduler.CosineAnnealingLR, T_max=10)),
    "lambda_by_step": _by("step", partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))),
    "warm_then_decay": _by("step", _warm_then_decay),
    "one_cycle_momentum": _by("step", _one_cycle),
}


def _fit_with(schedule: Any, bench: Bench) -> None:
    bench.fit(Net(optimizer=sgd, schedule=schedule))


for _name, _schedule in SCHEDULES.items():
    add(f"schedule_{_name}", partial(_fit_with, _schedule))


@scenario()
def schedule_plateau(bench: Bench) -> None:
    plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
    module = Net(optimizer=sgd, schedule=_by("epoch", plateau, monitor="val_loss"))
    bench.fit(module, val=bench.loader(batches=2), max_epochs=3)


class OwnSchedulerStep(Net):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2:
            scheduler.step()


class RateInTrainingStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 * (batch_idx + 1)
        return super().training_step(batch, batch_idx)


class RateAfterBatch(Callback):
    """Changes the rate and drops momentum between two batches, as restart tricks do."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.7
            group["momentum"] = 0.5


fits(
    schedule_one_cycle_betas=lambda bench: bench.fit(Net(schedule=_by("step", _one_cycle))),
    # Schedulers fill a tensor learning rate in place: remembering the object is not remembering the number.
    schedule_moves_a_tensor_lr=lambda bench: bench.fit(
        Net(optimizer=partial(torch.optim.SGD, lr=torch.tensor(0.05), foreach=False), schedule=_by("step", _halve))
    ),
    schedule_with_accumulation=lambda bench: bench.fit(Net(schedule=_by("step", _halve)), accumulate_grad_batches=2),
    schedule_monitored=lambda bench: bench.fit(
        Net(schedule=_by("step", _one_cycle)), callbacks=[LearningRateMonitor("step", log_momentum=True)]
    ),
    schedule_own_step_hook=lambda bench: bench.fit(OwnSchedulerStep(schedule=_by("step", _halve))),
    lr_set_in_training_step=lambda bench: bench.fit(RateInTrainingStep()),
    lr_set_after_batch=lambda bench: bench.fit(Net(optimizer=sgd), callbacks=[RateAfterBatch()]),
)
