"""Steps with side effects on what is neither tensor nor module: an environment, a replay buffer of Python objects."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.search import plan_after
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import Net, assert_close, fit, loader, report_of

pytestmark = support.IGNORED

STEPS = 20


class World:
    """A walk on a line, which ends after a while and begins anew; nothing of it can be put back from outside."""

    def __init__(self) -> None:
        self.steps = 0
        self.place = 0.0

    def step(self, action: int) -> tuple[list[float], float, list[float]]:
        self.steps += 1
        before = [self.place, 1.0]
        self.place = 0.0 if self.steps % 7 == 0 else self.place + (0.3 if action else -0.2) + random.gauss(0, 0.1)
        return before, -abs(self.place - 1), [self.place, 1.0]


# At module level: a step finds them without asking the model.
world = World()
memory: deque[tuple[list[float], int, float, list[float]]] = deque(maxlen=50)


class Replays(IterableDataset[Any]):
    """Draws from the memory while training goes on."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        for _ in range(8 * STEPS):
            before, action, reward, after = random.choice(memory)
            yield torch.tensor(before), torch.tensor(action), torch.tensor(reward), torch.tensor(after)


class Agent(Net):
    """Plays one step in each ``training_step``, and learns from what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.target = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.target.load_state_dict(self.net.state_dict())
        self.calls = 0

    def play(self) -> None:
        with torch.no_grad():
            values = self.net(torch.tensor([world.place, 1.0]))
        action = random.randrange(2) if random.random() < 0.3 else int(values.argmax())
        before, reward, after = world.step(action)
        memory.append((before, action, reward, after))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        self.play()
        before, actions, rewards, after = batch
        chosen = self.net(before).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            best = self.target(after).max(1).values
        if self.calls % 5 == 0:
            self.target.load_state_dict(self.net.state_dict())
        loss = F.mse_loss(chosen, rewards + 0.9 * best)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


def play(strategy: Any) -> tuple[Agent, Any]:
    """A fit from the same beginning each time."""
    world.__init__()  # type: ignore[misc]
    memory.clear()
    torch.manual_seed(0)
    random.seed(0)
    agent = Agent()
    for _ in range(20):
        agent.play()
    done = fit(agent, strategy, data=DataLoader(Replays(), batch_size=8))
    return agent, done


@pytest.mark.parametrize("dry_run", ["auto", "off"])
def test_a_roomy_budget_calls_the_step_as_often_as_training_does(dry_run: str) -> None:
    plain, one = play("auto")
    played, place, remembered = world.steps, world.place, list(memory)
    ours, two = play(MemoryBudgetStrategy("1GiB", dry_run=dry_run))
    assert ours.calls == plain.calls == STEPS
    assert (world.steps, world.place, list(memory)) == (played, place, remembered)
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


def test_a_bare_loop_is_stopped_as_well(offloads: None) -> None:
    model = nn.Linear(16, 16)
    said: list[str] = []
    calls: list[int] = []
    step = BudgetedStep(model, [torch.optim.SGD(model.parameters(), 0.1)], 500_000, HostMemory("cpu"), say=said.append)

    def loss(batch: Tensor) -> Tensor:
        calls.append(len(batch))
        hidden = batch
        for _ in range(100):
            hidden = model(hidden).tanh()
        return hidden.mean()

    step.run(loss, torch.ones(4, 16))
    assert said[-1] == "batch of 4 fits; counted while the first step was trained, without a dry run"
    assert calls == [4]
    step.run(loss, torch.ones(64, 16))  # a larger batch is a first one again
    assert any("was stopped" in line for line in said)
    assert any("call the step more often than training does" in line for line in said)
    assert step.report().steps == 2
    step.remove()


class Counting(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx)


def test_without_dry_runs_a_tight_budget_is_planned_from_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    plain, ours = Counting(), Counting()
    fit(plain, data=loader(5))
    done = fit(ours, MemoryBudgetStrategy(200_000, dry_run="off"), data=loader(5))
    report = report_of(done)
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
