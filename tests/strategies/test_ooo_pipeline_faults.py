"""A rank of `ooo_pipeline` is killed or raises: the other ends with its name, and nothing is left."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from retime import OOOPipelineStrategy
from retime.mechanisms.pipeline import Ownership
from support.pipeline_fits import Classifier, loader, trainer
from support.process_ends import in_shared_memory, runs
from support.ranks import RANK, run_ranks
from support.time_limits import limit_s

LOST = "RankLostError a message of"
FAULTS = {
    "gathers": (0, f"{LOST} rank 1 did not come"),
    "writes": (1, f"{LOST} rank 0 did not come"),
    "raises": (0, f"{LOST} rank 1 (stage"),
}


class Raises(Classifier):
    """On one rank, in the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if RANK == 1 and self.global_step == 2:
            raise ArithmeticError("of the module's own")
        return super().training_step(batch, batch_idx)


def kill(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def fit_fails(how: str, given: str) -> None:
    """Print the process and the error that the fit ends with."""
    print(os.getpid(), flush=True)
    folder = Path(given)
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
    try:
        if how == "raises":
            fit.save_checkpoint(folder / "part.ckpt")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)


@pytest.mark.parametrize("how", [pytest.param("gathers", marks=pytest.mark.long), "writes", "raises"])
def test_the_other_rank_ends_with_its_name(how: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, __file__, f"fit_fails|{how}|{tmp_path}", timeout_s=60, joined=False)
    printed = [one.stdout.partition("\n")[2] for one in ranks]
    other, said = FAULTS[how]
    pid, _, error = printed[other].partition("\n")
    assert error.startswith(said), ranks[other].stderr[-2000:]
    failed, of_failed = ranks[1 - other], printed[1 - other]
    if how == "raises":
        assert of_failed.partition("\n")[2].startswith("ArithmeticError of the module's own")
        for one in ranks:  # behind it, a checkpoint would have a part of the model
            assert "PipelineError 'net." in one.stdout
            assert "lies on another rank, since training over ranks that ended with an exception" in one.stdout
        assert not (tmp_path / "part.ckpt").exists()
    else:
        assert failed.returncode == -9
    for process in (pid, of_failed.split()[0]):
        assert not runs(process)
        assert not in_shared_memory(process)
