"""What a memory budget refuses, and what it says then: finders of batch sizes take it for out of memory."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.memory import is_oom_error
from torch.utils.data import DataLoader

from retime.mechanisms.memory_budget.offload.tier import HostError
from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import SMALL, Net, accelerate_loop, assert_close, fit, loader, norm, report_of, trainer

pytestmark = support.IGNORED


def test_a_refused_budget_trains_nothing(splits: None) -> None:
    module, seen = Net(), support.Steps()
    with pytest.raises(BudgetError, match=r"at least \d+ bytes.* are needed at task") as caught:
        fit(module, MemoryBudgetStrategy(2_000), callbacks=[seen])
    assert caught.value.layer
    assert seen.steps == 0
    assert_close(Net(), module, 0)
    assert all(parameter.grad is None for parameter in module.parameters())


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.parametrize(
    ("module", "pattern"), [(Manual, "needs automatic optimization"), (Iterates, r"training_step\(batch, batch_idx\)")]
)
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_steps_that_cannot_be_planned(module: type[Net], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        fit(module(), MemoryBudgetStrategy(SMALL))


@pytest.mark.parametrize(
    ("options", "more", "pattern"),
    [
        ({}, {"devices": 2}, "use devices=1"),
        ({"host": "disk:/nowhere/missing"}, {}, "missing"),
        ({"budget": "900TiB"}, {}, "give at most that"),
        ({"host": "memory"}, {}, "frees nothing when"),
    ],
    ids=["devices", "folder", "budget", "host"],
)
def test_what_cannot_be_had(options: dict[str, Any], more: dict[str, Any], pattern: str) -> None:
    with pytest.raises((ValueError, HostError), match=pattern):
        fit(Net(), MemoryBudgetStrategy(**{"budget": SMALL} | options), **more)


def test_the_reason_is_given_when_a_batch_cannot_be_split(splits: None) -> None:
    class Strange(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["pair"])

    batch = {"pair": (torch.randn(8, 16), torch.zeros(8).long()), "odd": torch.zeros(3)}
    with pytest.raises(ValueError, match="split_batch"):
        fit(Strange(), MemoryBudgetStrategy(SMALL), data=DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


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
