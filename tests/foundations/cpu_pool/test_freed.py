"""Freed memory while batches run under a budget: kept for the next tensors, as much as the plans have room for."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool.pool import FreedMemory, MemoryPool
from retime.mechanisms.memory_budget.costs import StepCosts
from retime.mechanisms.memory_budget.offload.hosts import parse_host
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import OffloadPlan
from support.memory_budget import OFFLOADS, SPLITS, use_costs

pytestmark = pytest.mark.filterwarnings("ignore:host='disk.*is a file system in memory")
PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
KIB, MIB = 2**10, 2**20
WIDTH, BATCH = 256, 1024  # activations of a MiB
AMPLE, TIGHT = 64 * MIB, 9 * MIB


def most_held(pool: MemoryPool) -> int:
    """What live tensors and kept memory come to when more was freed than may be kept."""
    torch.empty(2 * AMPLE, dtype=torch.uint8)
    counts = pool.counts()
    return counts.live + counts.free


def assert_holds(pool: MemoryPool, nbytes: int) -> None:
    assert 0 <= nbytes - most_held(pool) < PAGE


def test_tensors_of_other_allocators_count(pool: MemoryPool) -> None:
    freed = FreedMemory(torch.device("cpu"))
    assert freed.note == ""
    small, large = torch.empty(8 * KIB, dtype=torch.uint8), torch.empty(MIB, dtype=torch.uint8)
    freed.hold(4 * MIB, [small, large, large[:5]])
    assert_holds(pool, 4 * MIB - 8 * KIB)
    freed.close()


class Training:
    """A model in steps under a budget."""

    def __init__(self, budget: int, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.step = BudgetedStep(self.model, [self.optimizer], budget, parse_host(f"disk:{folder}", "cpu"), **options)

    def loss(self, part: Tensor) -> Tensor:
        return self.model(part).square().mean()

    def run(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.step.run(self.loss, batch)
        self.optimizer.step()

    def elsewhere(self, pool: MemoryPool, batch: Tensor) -> int:
        """Bytes of biases, which are too small for the pool, and their momenta."""
        momenta = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return pool.bytes_elsewhere([*self.model.parameters(), *momenta, batch])


Make = Callable[..., Training]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Make]:
    trainings: list[Training] = []

    def make(budget: int, **options: Any) -> Training:
        trainings.append(Training(budget, tmp_path, **options))
        return trainings[-1]

    yield make
    for one in trainings:
        one.step.remove()


@pytest.mark.parametrize(
    ("budget", "costs"),
    [(AMPLE, StepCosts()), (TIGHT, SPLITS), (TIGHT, OFFLOADS)],
    ids=["plain", "sub-batches", "offload"],
)
def test_steps_hold_what_their_plan_says(
    pool: MemoryPool, training: Make, monkeypatch: pytest.MonkeyPatch, budget: int, costs: StepCosts
) -> None:
    use_costs(monkeypatch, replace(costs, spare_bytes=KIB, scratch_bytes=512 * KIB))
    others = pool.counts().live  # what is left in this process from before, if anything
    ours, batch = training(budget), torch.randn(BATCH, WIDTH)
    shape = ours.step.plan(ours.loss, batch)
    nbytes = shape.choice.reserved_bytes(budget) - ours.elsewhere(pool, batch)
    assert_holds(pool, nbytes)
    ours.run(batch)
    pool.reset_peaks()
    ours.run(batch)
    counts = pool.counts()
    assert counts.peak_live > nbytes // 2
    assert counts.peak_reserved <= nbytes + others
    assert counts.reused > 4 * counts.mapped


def test_the_largest_plan_counts(pool: MemoryPool, training: Make) -> None:
    ours = training(AMPLE)
    batches = [torch.randn(BATCH, WIDTH), torch.randn(BATCH // 8, 2, WIDTH)]
    large, small = (ours.step.plan(ours.loss, batch) for batch in batches)
    assert large.choice.reserved_bytes(AMPLE) > small.choice.reserved_bytes(AMPLE)
    assert_holds(pool, large.choice.reserved_bytes(AMPLE) - ours.elsewhere(pool, batches[1]))


def test_room_is_left_for_tensors_that_nothing_holds(pool: MemoryPool, training: Make) -> None:
    ours, batch = training(AMPLE, hidden_bytes=256 * KIB), torch.randn(BATCH, WIDTH)
    shape = ours.step.plan(ours.loss, batch)
    assert_holds(pool, shape.choice.reserved_bytes(AMPLE) - 256 * KIB - ours.elsewhere(pool, batch))


def test_plans_leave_room_for_scratch_once_it_was_measured() -> None:
    choice = PlanChoice(OffloadPlan(BATCH), 0, 1000, 1.0, 1.0, 0, 0, scratch_bytes=100)
    assert 1000 < choice.reserved_bytes(10**6) < 2000
    assert choice.reserved_bytes(1010) == 1010, "the budget is the most"
    measured = replace(choice, spare_bytes=10)
    assert measured.reserved_bytes(1010) == 900
    assert measured.reserved_bytes(1020) == 910, "freed ranges need a little more than tensors"
    assert measured.reserved_bytes(10**6) == 900 + 900 // 64
