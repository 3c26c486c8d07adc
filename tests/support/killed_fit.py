"""One rank of a fit in which a rank gets a signal: `STRATEGY PHASE SIGNAL RANK [LATER_MS]`. Prints its process and end.

`LATER_MS` after that rank, the other one gets the signal too.
"""

import atexit
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from tempfile import TemporaryDirectory
from threading import Timer

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import retime
from retime.strategies.support import lightning_private
from support.time_limits import limit_s
from support.trainers import quiet_trainer

RANK = int(os.environ["RANK"])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
WAITS = timedelta(minutes=10)
"""Longer than a test: nothing may end by it."""
STRATEGIES = {
    "ooo_pipeline": lambda: retime.OOOPipelineStrategy(timeout=WAITS),
    "update_on_host": lambda: retime.CPUAccumulateStrategy(update_on_host=True, timeout=WAITS),
    "ooo_ddp": lambda: retime.OOODataParallelStrategy(timeout=WAITS),
    "fused_optimizer_ddp": lambda: retime.FusedOptimizerDDPStrategy(timeout=WAITS),
}


class Hit(LightningModule):
    """Sends itself a signal in a batch of this phase."""

    def __init__(self, phase: str, number: signal.Signals, delay_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
        self.phase, self.number, self.delay_s = phase, number, delay_s

    def _pass(self, phase: str, batch_idx: int) -> None:
        if phase == self.phase and batch_idx == 3:
            self.phase = ""  # a pipeline calls the step for each micro-batch
            print("hit", time.time(), flush=True)
            if self.delay_s:
                Timer(self.delay_s, os.kill, (os.getpid(), self.number)).start()
            else:
                os.kill(os.getpid(), self.number)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._pass("training", batch_idx)
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._pass("validation", batch_idx)
        self.log("loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class TellsOfEnd(Callback):
    """As a callback that saves when a scheduler ends the fit."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        print("callback", type(exception).__name__, flush=True)


def main(name: str, phase: str, number: str, rank: str, later_ms: str | None = None) -> None:
    loader = DataLoader(torch.randn(48, 16), batch_size=4)
    with TemporaryDirectory() as folder:
        callbacks = [ModelCheckpoint(folder, every_n_train_steps=2), TellsOfEnd()]
        limits = {"enable_checkpointing": True, "max_epochs": 50, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(devices=2, strategy=STRATEGIES[name](), callbacks=callbacks, **limits)
        first = int(rank) == RANK
        delay_s = 0.0 if first or later_ms is None else int(later_ms) / 1000
        lightning_private._TOGETHER_S = 0.2 if later_ms is None else limit_s(2)  # a busy machine is late with signals
        model = Hit(phase if first or later_ms is not None else "", signal.Signals[number], delay_s)
        trainer.fit(model, loader, loader)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(os.getpid(), flush=True)
    try:
        main(*sys.argv[1:])
    except BaseException as error:
        print(type(error).__name__, str(error).partition("\n")[0], flush=True)
    atexit._run_exitfuncs()  # a forked rank leaves without them
    print("end", time.time(), flush=True)
    sys.exit()
