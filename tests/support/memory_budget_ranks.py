"""What tests of the memory budget on two ranks share."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import retime.mechanisms.memory_budget.planner as step_planner
from retime.mechanisms.memory_budget.costs import StepCosts
from retime.mechanisms.memory_budget.data_parallel import BudgetedDataParallelStep
from retime.mechanisms.memory_budget.offload.hosts import parse_host
from support import memory_budget as support
from support.garbage import pass_over_what_is_there
from support.memory_budget import CLASSES, FEATURES, loader
from support.ranks import RANK, on_ranks

SMALL = 130_000  # bytes; the plain step needs 209,000 and its buckets 10,000


def plan_with(costs: StepCosts) -> None:
    step_planner.calibrate = step_planner.least_costs = lambda *_, **__: costs  # type: ignore[assignment]
    step_planner.PlanTrial.step_ms = lambda *_: None  # type: ignore[method-assign]


def fit(module: LightningModule, strategy: Any = "ddp", data: Any = None, **options: Any) -> Trainer:
    if data is None:
        return support.fit(module, strategy, loader(6), devices=2, **options)
    return support.fit(module, strategy, data, devices=2, use_distributed_sampler=False, **options)


def batches(sizes: list[int]) -> DataLoader[Any]:
    """This rank's own batches, whatever the other has."""
    torch.manual_seed(10 + RANK)
    return served([(torch.randn(size, FEATURES), torch.randint(CLASSES, (size,))) for size in sizes])


def served(own: list[Any]) -> DataLoader[Any]:
    return DataLoader(own, batch_size=None)  # type: ignore[arg-type]


def report(trainer: Trainer) -> Any:
    return trainer.strategy.report()  # type: ignore[attr-defined]


@contextmanager
def other_backend() -> Iterator[None]:
    """As on CUDA, where DDP's own group cannot carry what the ranks say to one another."""
    real = dist.get_backend
    dist.get_backend = lambda *_: "nccl"  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.get_backend = real


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def budgeted(model: DistributedDataParallel, **options: Any) -> BudgetedDataParallelStep:
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    return BudgetedDataParallelStep(model, optimizers, SMALL, parse_host(None, torch.device("cpu")), **options)


def _as_in_tests() -> None:
    """Warnings are errors, as in the tests' own process."""
    pass_over_what_is_there()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("error")
    for message in (".*LeafSpec", ".*does not have many workers", ".*number of training batches", ".*all_gather is"):
        warnings.filterwarnings("ignore", message=message)


on_two_ranks = on_ranks(pytest.param(2, marks=pytest.mark.long), before=_as_in_tests)
