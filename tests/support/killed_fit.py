"""One rank of a fit in which a rank gets a signal: `STRATEGY PHASE SIGNAL RANK`. Prints its process and its end."""

import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import retime
from retime.mechanisms.cpu_accumulation import host_update

RANK = int(os.environ["RANK"])
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

    def __init__(self, phase: str, number: signal.Signals) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
        self.phase, self.number = phase, number

    def _pass(self, phase: str, batch_idx: int) -> None:
        if phase == self.phase and batch_idx == 3:
            self.phase = ""  # a pipeline calls the step for each micro-batch
            print("hit", time.time(), flush=True)
            os.kill(os.getpid(), self.number)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._pass("training", batch_idx)
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._pass("validation", batch_idx)
        self.log("loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(name: str, phase: str, number: str, rank: str) -> None:
    host_update._PATIENCE = timedelta(seconds=1)  # it is waited for in most of these fits
    loader = DataLoader(torch.randn(48, 16), batch_size=4)
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=STRATEGIES[name](),
            logger=False,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=2)],
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=50,
            num_sanity_val_steps=0,
        )
        trainer.fit(Hit(phase if int(rank) == RANK else "", signal.Signals[number]), loader, loader)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(os.getpid(), flush=True)
    try:
        main(*sys.argv[1:])
    except BaseException as error:
        print(type(error).__name__, str(error).partition("\n")[0], flush=True)
    print("end", time.time(), flush=True)
    os._exit(0)
