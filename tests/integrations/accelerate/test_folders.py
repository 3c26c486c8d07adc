"""Folders of `save_state` are plain ones, with each object: both ways, and training goes on bit by bit.

Those of pipelines are in test_pipeline_folders.py: up to rounding, as a pipeline itself.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from retime.integrations.accelerate import (
    CPUAccumulate,
    FusedOptimizer,
    MemoryBudget,
    OutOfOrderDataParallel,
    TwoStreams,
)
from support.ranks import SHARED, on_ranks

FEATURES, BATCH, BATCHES, ACCUMULATED = 16, 256, 8, 2
HALF = BATCHES // 2
BUDGET = 420_000
"""Bytes at which activations have to leave; the plain step takes more."""
Method = Callable[["Loop"], Any]
ON_ONE: dict[str, Method] = {
    "fused backward": lambda loop: FusedOptimizer(loop.accelerator, loop.model, loop.optimizer, "backward"),
    "fused forward": lambda loop: FusedOptimizer(loop.accelerator, loop.model, loop.optimizer, "forward"),
    "budget": lambda loop: MemoryBudget(loop.accelerator, loop.model, loop.optimizer, BUDGET, dry_run="off", say=str),
    "two streams": lambda loop: TwoStreams(loop.accelerator, loop.model, threads=(torch.get_num_threads(),) * 2),
}
ON_TWO: dict[str, Method] = {
    "fused backward": ON_ONE["fused backward"],
    "fused forward": ON_ONE["fused forward"],
    "budget": lambda loop: MemoryBudget(loop.accelerator, loop.model, loop.optimizer, "1GiB", say=str),
    "out of order": lambda loop: OutOfOrderDataParallel(loop.accelerator, loop.model, loop.optimizer, k=1),
    "host": lambda loop: CPUAccumulate(loop.accelerator, loop.model),
}


def did_something(method: Any) -> bool:
    """Whether the loop went another way than the plain one."""
    report = method.report()
    if isinstance(method, FusedOptimizer):
        return report.fused_updates > 0
    if isinstance(method, TwoStreams):
        return report.sub_stream + report.main_stream > 0
    if isinstance(method, MemoryBudget):
        return report[0].steps > 0 and (dist.is_initialized() or report[0].offload.storages > 0)
    return "2 ranks" in str(report) or "blocks" in str(report)


class Loop:
    """A loop with dropout, accumulation, AdamW and a scheduler.

    Args:
        method: None is the plain one.
        seed: of the first weights, and of dropout.
    """

    def __init__(self, method: Method | None, seed: int = 0) -> None:
        AcceleratorState._reset_state()
        handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=ACCUMULATED,
            kwargs_handlers=handlers,
            step_scheduler_with_optimizer=False,
        )
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Dropout(0.1)) for _ in range(BATCHES)]
        net = nn.Sequential(*layers, nn.Linear(FEATURES, 1))
        plain = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(net, plain, schedule)
        self.method = None if method is None else method(self)

    def run(self, start: int, end: int) -> None:
        """Train on these batches."""
        for number in range(start, end):
            generator = torch.Generator().manual_seed(2 * number + self.accelerator.process_index)
            batch = torch.randn(BATCH, FEATURES, generator=generator)
            with self.accelerator.accumulate(self.model):
                budget = isinstance(self.method, MemoryBudget)
                with self.method.forward(self._loss, batch) if budget else nullcontext():
                    loss = self._loss(batch)
                self.accelerator.backward(loss)
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.schedule.step()
                self.optimizer.zero_grad()

    def _loss(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))
        self.accelerator.wait_for_everyone()

    def end(self) -> dict[str, Any]:
        """What is left: weights, state, rate and random numbers."""
        left = {name.removeprefix("module."): value.clone() for name, value in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            left |= {f"{number} {name}": value.clone() for name, value in state.items()}
        left |= {"rate": torch.tensor(self.schedule.get_last_lr()), "random": torch.rand(3)}
        if self.method is not None:
            assert did_something(self.method), self.method.report()
            self.method.remove()
        return left


def assert_folders_are_interchangeable(method: Method, scratch: Path) -> None:
    """Training goes on from a folder bit by bit, whoever wrote it and whoever reads it."""
    folders = {kind: scratch / kind for kind in ("plain", "ours")}
    whole = {}
    for kind, folder in folders.items():
        loop = Loop(method if kind == "ours" else None)
        loop.run(0, HALF)
        loop.save(folder)
        loop.run(HALF, BATCHES)
        whole[kind] = loop.end()
    assert_same(whole["plain"], whole["ours"])
    names = {kind: {path.name for path in folder.iterdir()} for kind, folder in folders.items()}
    assert {name for name in names["ours"] if not name.startswith("retime_")} == names["plain"]
    for writer, reader in (("plain", "ours"), ("ours", "plain"), ("ours", "ours")):
        loop = Loop(method if reader == "ours" else None, seed=7)
        loop.accelerator.load_state(str(folders[writer]))
        loop.run(HALF, BATCHES)
        assert_same(whole["plain"], loop.end())


def assert_same(plain: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    assert plain.keys() == ours.keys()
    assert [name for name, value in plain.items() if not torch.equal(value, ours[name])] == []


@pytest.mark.parametrize("name", ON_ONE)
def test_a_folder_of_one_process(name: str, tmp_path: Path) -> None:
    assert_folders_are_interchangeable(ON_ONE[name], tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@on_ranks(2, joined=False)
def test_folders_of_two_processes() -> None:
    for name, method in ON_TWO.items():
        assert_folders_are_interchangeable(method, SHARED / name)
