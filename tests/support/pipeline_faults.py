"""One rank of a fit in which a rank fails; the argument names how. Prints its process and the error it ends with."""

import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from retime import OOOPipelineStrategy
from retime.mechanisms.pipeline import Ownership
from support.pipeline_fits import Classifier, loader, trainer
from support.time_limits import limit_s

RANK = int(os.environ["RANK"])


class Raises(Classifier):
    """On one rank, in the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if RANK == 1 and self.global_step == 2:
            raise ArithmeticError("of the module's own")
        return super().training_step(batch, batch_idx)


def kill(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def main(how: str, folder: Path) -> None:
    if how == "gathers" and RANK == 1:
        Ownership.gather = kill  # type: ignore[method-assign]
    if how == "writes" and RANK == 0:
        TorchCheckpointIO.save_checkpoint = kill  # type: ignore[method-assign]
    saves = [ModelCheckpoint(folder, every_n_train_steps=1)] if how != "raises" else []
    strategy = OOOPipelineStrategy(timeout=timedelta(seconds=limit_s(20)))
    fit = trainer(strategy, folder, devices=2, max_epochs=1, callbacks=saves, enable_checkpointing=bool(saves))
    try:
        fit.fit(Raises() if how == "raises" else Classifier(), loader())
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    if how == "raises":
        fit.save_checkpoint(folder / "part.ckpt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(os.getpid(), flush=True)
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
