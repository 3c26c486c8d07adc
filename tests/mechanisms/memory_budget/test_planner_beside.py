"""What examines a step, dry runs and probes, is over before the first step, and later has room made for it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool import pool as freed_memory
from retime.foundations.cpu_pool.pool import MemoryPool
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.planner import StepPlanner
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import BudgetError, OffloadPlan

WIDTH, SAMPLES, SUB_BATCH = 256, 100, 40
HELD_BYTES = 2**23


class Counted:
    """A step in sub-batches of 40 samples whose calls are counted, with what the pool kept free during each."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.inside = BudgetedStep(self.model, [self.optimizer], "1GiB", HostMemory("cpu"), make_plan=self._plan)
        self.calls: list[int] = []
        self.free: list[int] = []
        self.pool: MemoryPool | None = None

    def loss(self, batch: Tensor) -> Tensor:
        self.calls.append(len(batch))
        if self.pool is not None:
            self.free.append(self.pool.counts().free)
        return self.model(batch).square().mean()

    def train(self, samples: int) -> None:
        self.calls.clear()
        self.free.clear()
        self.inside.run(self.loss, torch.randn(samples, WIDTH))

    @staticmethod
    def _plan(planner: StepPlanner, step: Any, batch: Any, samples: int) -> PlannedShape:
        plan, certificate = OffloadPlan(SUB_BATCH), planner.certify(step, batch)
        if planner.whole_because:
            raise BudgetError("no room", floor_bytes=2, task="", layer="", hint=certificate.reason, samples=samples)
        choice = PlanChoice(plan, 0, HELD_BYTES, 1.0, 1.0, 0, 0, tensor_bytes=HELD_BYTES)
        return PlannedShape(samples, choice, certificate)


def test_a_planned_step_runs_its_parts_alone() -> None:
    one = Counted()
    one.inside.plan(one.loss, torch.randn(SAMPLES, WIDTH))
    one.train(SAMPLES)
    one.inside.remove()
    assert one.calls == [34, 33, 33]


def test_parts_that_do_something_else_are_refused_before_the_first_step() -> None:
    class Odd(Counted):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) * (2 if len(batch) in (33, 34) else 1)

    one = Odd()
    with pytest.warns(match="run whole"), pytest.raises(BudgetError, match="something else with more samples"):
        one.inside.plan(one.loss, torch.randn(SAMPLES, WIDTH))
    one.inside.remove()


def test_what_planning_took_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    one, trimmed = Counted(), []
    monkeypatch.setattr(freed_memory, "trim_heap", lambda: trimmed.append(len(one.calls)))
    one.inside.plan(one.loss, torch.randn(SAMPLES, WIDTH))
    planning = len(one.calls)
    one.train(SAMPLES)
    one.inside.remove()
    assert trimmed == [planning]


def test_a_smaller_batch_is_compared_where_freed_memory_was(pool: MemoryPool) -> None:
    one = Counted()
    one.train(SAMPLES)
    one.pool = pool
    one.train(SAMPLES)
    assert min(one.free[1:]) > 0, "freed memory waits for the next tensors"
    one.train(90)  # in parts of 30
    parts = one.calls.count(30)
    compared = [free for free, samples in zip(one.free, one.calls, strict=True) if samples != 30]
    assert compared, "no size of these was compared before"
    assert set(compared) == {0}
    assert parts > 3, "30 samples were compared with fewer"
    one.train(90)
    one.inside.remove()
    assert one.calls == [30, 30, 30]
    assert min(one.free[1:]) > 0
