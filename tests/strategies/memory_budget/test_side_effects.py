"""Steps with side effects on what is neither tensor nor module, such as an environment or a replay buffer."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.plans import BatchRecord, PlanCache
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice, plan_after
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import BudgetError, OffloadPlan
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import Net, assert_close, fit, fit_both, loader, report_of

pytestmark = support.IGNORED

STEPS = 20
played: list[float] = []
"""At module level: a step finds it without asking the model, and nothing of it can be put back from outside."""


class Plays(Net):
    """Plays on in each ``training_step``, and learns from what was played before."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        played.append(random.gauss(len(played), 0.1))
        loss = super().training_step(batch, batch_idx) * (1 + random.choice(played) / 100)
        self.log("loss", loss, on_epoch=True)
        return loss


def play(strategy: Any) -> tuple[Plays, Any]:
    """A fit from the same beginning each time."""
    played.clear()
    random.seed(0)
    module = Plays()
    return module, fit(module, strategy, data=loader(STEPS))


@pytest.mark.parametrize("dry_run", ["auto", "off"])
def test_a_roomy_budget_calls_the_step_as_often_as_training_does(dry_run: str) -> None:
    plain, one = play("auto")
    expected = [*played]
    ours, two = play(MemoryBudgetStrategy("1GiB", dry_run=dry_run))
    assert ours.calls == plain.calls == STEPS
    assert played == expected
    assert_close(plain, ours, 0)
    assert two.callback_metrics == one.callback_metrics
    assert report_of(two).steps == STEPS


class Repeated(Net):
    """One layer again and again: small weights, a small batch, and many activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(()))
        self.history: list[int] = []
        self.total = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.history.append(batch_idx)
        self.seen += 1
        self.total += batch[0].sum()
        batch[0].mul_(2)
        self.log("early", batch[0].mean(), on_step=True, on_epoch=True)
        hidden = self.norm(batch[0])
        for _ in range(60):
            hidden = F.dropout(self.layer(hidden), 0.1).tanh()
        self.log("late", hidden.mean(), on_step=True, on_epoch=True)
        return F.cross_entropy(hidden, batch[1])


def test_a_first_step_that_may_not_fit_is_stopped_and_runs_again(
    offloads: None, caplog: pytest.LogCaptureFixture
) -> None:
    plain, ours = Repeated(), Repeated()
    one = fit(plain)
    two = fit(ours, MemoryBudgetStrategy(2_500_000))
    assert len([line for line in caplog.messages if "was stopped in its forward pass" in line]) == 1
    assert report_of(two).steps == report_of(two).sub_batches == 3
    assert len(report_of(two).shapes) == 1
    assert ours.history == plain.history
    assert torch.equal(ours.total, plain.total)
    assert one.callback_metrics == two.callback_metrics
    assert_close(plain, ours, 0)


class BareLoop:
    """Notes how many samples the step was called with."""

    def __init__(self, **options: Any) -> None:
        self.model, self.calls = nn.Linear(16, 16), list[int]()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.step = BudgetedStep(self.model, [optimizer], 500_000, HostMemory("cpu"), **options)

    def run(self, *shape: int) -> None:
        self.step.run(self._loss, torch.ones(*shape, 16))

    def _loss(self, hidden: Tensor) -> Tensor:
        self.calls.append(len(hidden))
        for _ in range(100):
            hidden = self.model(hidden).tanh()
        return hidden.mean()


def test_a_larger_batch_behind_a_first_one_is_not_run_dry() -> None:
    loop = BareLoop(dry_run="off")
    for samples in (32, 64, 64, 32):
        loop.run(samples)
    assert loop.calls == [32, 64, 64, 32]
    loop.step.remove()


def test_each_shape_is_planned_from_its_own_first_step() -> None:
    """Not from what the last step held, which is another shape's."""
    plans = []
    for shapes in ([(64,), (64,)], [(64,), (40, 1), (64,), (40, 1)]):
        loop = BareLoop(dry_run="off")
        for shape in shapes:
            loop.run(*shape)
        assert loop.calls == [samples for samples, *_ in shapes]
        plans.append({shape.samples: shape.choice for shape in loop.step.report().shapes})
        loop.step.remove()
    alone, in_turns = plans
    assert list(alone) == [64]
    assert list(in_turns) == [64, 40]
    assert alone[64].plan.offload, "not all of it fits"
    assert in_turns[64] == alone[64]


def test_two_shapes_in_flight_are_planned_when_their_backward_passes_have_ended() -> None:
    loop = BareLoop(dry_run="off", sub_batches=False)
    for _ in range(2):
        losses = []
        for batch in (torch.ones(64, 16), torch.ones(40, 1, 16)):
            with loop.step.offloading(loop._loss, batch):
                losses.append(loop._loss(batch))
        sum(losses).backward()
    assert [shape.samples for shape in loop.step.report().shapes] == [64, 40]
    loop.step.remove()


def test_a_batch_of_more_samples_and_less_of_all_else_leaves_the_others_plan() -> None:
    def record(samples: int, size: int) -> BatchRecord:
        one = BatchRecord.__new__(BatchRecord)
        one.key, one.samples, one.sizes = ("shape",), samples, (size,)
        return one

    cache, records = PlanCache(), [record(4, 1000), record(8, 500)]
    for one in records:
        cache.add(one, PlannedShape(one.samples, PlanChoice(OffloadPlan(one.samples))))
    assert [cache.find(one).samples for one in records] == [4, 8]
    cache.add(record(8, 1000), PlannedShape(8, PlanChoice(OffloadPlan(8))))
    assert len(cache) == 1


def test_a_bare_loop_is_stopped_as_well(offloads: None) -> None:
    said: list[str] = []
    loop = BareLoop(say=said.append)
    loop.run(4)
    assert said[-1] == "batch of 4 fits; counted while the first step was trained, without a dry run"
    assert loop.calls == [4]
    loop.run(64)  # a larger batch is a first one again
    assert any("was stopped" in line for line in said)
    assert any("call the step more often than training does" in line for line in said)
    assert loop.step.report().steps == 2
    loop.step.remove()


class Counting(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx)


def test_without_dry_runs_a_tight_budget_is_planned_from_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    plain, ours, report = fit_both(Counting, MemoryBudgetStrategy(200_000, dry_run="off"), loader(5))
    assert ours.calls == plain.calls == 5
    assert_close(plain, ours, 0)
    (shape,) = report.shapes
    assert 0 < len(shape.choice.plan.offload) < shape.choice.plan.saved
    assert report.offload.storages == shape.choice.plan.saved + 4 * len(shape.choice.plan.offload)
    assert shape.choice.peak_bytes <= 200_000
    assert not any("more often" in line for line in caplog.messages)


def test_without_dry_runs_a_budget_that_the_first_step_exceeded_ends_training() -> None:
    with pytest.raises(BudgetError, match="was exceeded in the first step of a shape: at least"):
        fit(Counting(), MemoryBudgetStrategy(40_000, dry_run="off"))


def test_without_dry_runs_around_forward_passes_of_ones_own() -> None:
    plain, *_ = support.accelerate_loop("plain")
    ours, (report,), _ = support.accelerate_loop("forward", dry_run="off")
    assert report.offload.storages > 0
    assert_close(plain, ours, 0)


def test_what_stays_is_what_comes_back_first() -> None:
    choice = plan_after(8, [10, 10, 10, 10], 50, 125)
    assert str(choice.plan) == "sub-batch 8, prefetch 1, offload 0 of 4"
    assert (choice.peak_bytes, choice.out_bytes, choice.in_flight_bytes) == (100, 10, 10)
    assert str(plan_after(8, [10, 10], None, 125).plan) == "sub-batch 8, prefetch 0, offload 0-1 of 2"
    assert str(plan_after(8, [10, 10], 50, 1000).plan) == "sub-batch 8, prefetch 1, offload none of 2"
