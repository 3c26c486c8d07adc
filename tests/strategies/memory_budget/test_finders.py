"""Finders of batch sizes take a refused budget for out of memory, and settle on a batch that fits."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.memory import is_oom_error
from torch.utils.data import DataLoader

from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import Net, accelerate_loop, fit, loader, norm, report_of, trainer

pytestmark = support.IGNORED
DEPTH, BUDGET = 3, 36_000  # a batch of 128 needs 43,000 bytes at least


class Sized(Net):
    """BatchNorm keeps batches whole, so that a budget bounds their size; the finder sets ``batch_size``."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(norm, depth=DEPTH)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(loader(1, batch=1024).dataset, self.batch_size, drop_last=True)


def test_lightning_tunes_the_batch_size(offloads: None, tmp_path: Path) -> None:
    module = Sized(2)
    runner = trainer(MemoryBudgetStrategy(BUDGET), default_root_dir=tmp_path)
    size = Tuner(runner).scale_batch_size(module, init_val=32, steps_per_trial=1)
    assert size == module.batch_size
    with pytest.raises(BudgetError):
        fit(Sized(2 * size), MemoryBudgetStrategy(BUDGET), data=loader(1, batch=2 * size))
    runner.fit(module)
    assert report_of(runner).steps
    assert report_of(runner).shapes[0].choice.peak_bytes <= BUDGET


def test_accelerate_finds_an_executable_batch_size(offloads: None) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=128, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def train(batch_size: int) -> Any:
        tried.append(batch_size)
        data = loader(2, batch=batch_size)
        _, (report,), _ = accelerate_loop("forward", budget=BUDGET, module=Net(norm, depth=DEPTH), data=data)
        return report

    report = train()
    assert len(tried) > 1
    assert report.steps == 2
    assert report.shapes[0].samples == tried[-1] < 128
    assert report.shapes[0].choice.peak_bytes <= BUDGET


def test_a_refused_budget_is_out_of_memory() -> None:
    refused = BudgetError("no", floor_bytes=1, task="", layer="", hint="none.")
    assert is_oom_error(refused)
    assert should_reduce_batch_size(refused)
    assert isinstance(refused, ValueError)  # as all errors of schedules
    assert not is_oom_error(ValueError(*refused.args))
    assert "CPUAllocator" not in str(refused), "it may be a CUDA device's budget"
    for again in (pickle.loads(pickle.dumps(refused)), copy.copy(refused)):  # as a search in worker processes gets it
        assert (type(again), str(again), vars(again)) == (BudgetError, str(refused), vars(refused))
