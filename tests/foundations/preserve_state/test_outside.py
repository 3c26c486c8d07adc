"""What a step reaches without asking its model - globals, closures, default arguments - is not changed by planning."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retime.mechanisms.memory_budget.planner as step_planner
from retime.foundations.messages import DifferenceWarning
from retime.foundations.preserve_state.outside import ValueReadError
from retime.foundations.preserve_state.stand_ins import LeftBehindError, ScratchModel
from retime.mechanisms.memory_budget.dry_run.run import DryRun, TrainingStep, profile_step, take
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import OffloadPlan
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import BATCH, SMALL, Net, fit, loader, run_loop

pytestmark = support.IGNORED
PLAIN, TIGHT = 700_000, 170_000  # enough for the plain step, but not without a dry run; and not enough


@dataclass
class Held:
    """Nothing in the model leads here."""

    count: Tensor = field(default_factory=lambda: torch.zeros(()))
    whole: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.long))
    table: Tensor = field(default_factory=lambda: torch.zeros(4, 3))
    listed: list[Tensor] = field(default_factory=lambda: [torch.zeros(2), torch.zeros(2)])
    given: Tensor = field(default_factory=lambda: torch.zeros(2))
    named: dict[str, Tensor] = field(default_factory=lambda: {"calls": torch.zeros(()), "inputs": torch.zeros(())})
    summed: Tensor = field(default_factory=lambda: torch.empty(0))
    scale: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.ones(())))
    teacher: nn.Module = field(default_factory=lambda: nn.BatchNorm1d(support.FEATURES))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def values(self) -> dict[str, Any]:
        gradients = {"gradient": self.scale.grad, "weight's gradient": self.teacher.weight.grad}
        kept = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)} | gradients
        kept |= self.named | self.teacher.state_dict() | {str(index): one for index, one in enumerate(self.listed)}
        kept["generator"] = self.generator.get_state()
        assert all(type(one) in (Tensor, nn.Parameter, type(None)) for one in kept.values()), kept
        return {name: None if value is None else value.detach().clone() for name, value in kept.items()}


held = Held()


def write(inputs: Tensor, count: Tensor) -> None:
    """In all kinds of ways."""
    held.count.add_(1)
    held.whole += 1
    held.table[0].add_(1)
    held.table[1] = inputs[0, :3]
    held.table.data[2].copy_(held.table[1])
    held.table[3] = torch.rand(3, generator=held.generator)
    torch._foreach_add_(held.listed, 1.0)
    torch.add(held.given, 1, out=held.given)
    torch.sum(inputs.detach(), 0, out=held.summed)
    held.named["calls"] += 1
    held.named["inputs"] += inputs.detach().sum()
    count.add_(1)
    with torch.no_grad():
        held.scale.mul_(1.5)


def step_on(model: nn.Module, read: bool) -> Callable[[Any], Tensor]:
    """A step that writes, and whose loss may follow from what is written."""
    local = torch.zeros(())

    def step(batch: Any, default: Tensor = held.given) -> Tensor:
        write(batch[0], local)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if not read:
            return loss
        teached = held.teacher(batch[0]).square().mean()
        return (loss + 0.1 * teached) * (1 + held.count / 10) * held.scale + 0.1 * local + held.table[3].sum()

    return step


def train(budget: int | None, read: bool, steps: int = 4) -> tuple[Net, dict[str, Any], Any]:
    global held
    torch.manual_seed(0)
    held, model = Held(), Net()
    report = run_loop(model, step_on(model, read), list(loader(steps)), budget)
    return model, held.values(), report


def differing(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    pairs = {name: (value, two[name]) for name, value in one.items()}
    same = {
        name: left is right if left is None or right is None else torch.equal(left, right)
        for name, (left, right) in pairs.items()
    }
    return [name for name, value in same.items() if not value]


@pytest.mark.parametrize(("budget", "measured"), [(2**30, False), (PLAIN, False), (TIGHT, False), (TIGHT, True)])
def test_training_writes_once_a_step(budget: int, measured: bool, request: pytest.FixtureRequest) -> None:
    if not measured:
        request.getfixturevalue("offloads")
    plain, expected, _ = train(None, read=True)
    ours, values, report = train(budget, read=True)
    assert differing(expected, values) == []
    support.assert_close(plain, ours, 0)
    assert report.sub_batches == 4
    assert (report.offload is not None) == (budget == TIGHT)


def added(count: Tensor) -> None:
    count.add_(1)


def bound(count: Tensor) -> None:
    count.data = count.data + 1


@pytest.mark.parametrize("write", [added, bound])
def test_a_first_step_that_is_stopped_writes_once(
    write: Callable[[Tensor], None], offloads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if write is bound:  # which is seen only there, and other tests of this process may have compiled
        monkeypatch.setattr(step_planner, "nothing_compiled", lambda: True)
    model, count, said = nn.Linear(16, 16), torch.zeros(()), list[str]()

    def loss(batch: Tensor) -> Tensor:
        write(count)
        for _ in range(100):
            batch = model(batch).tanh()
        return batch.mean()

    step = BudgetedStep(model, [torch.optim.SGD(model.parameters(), 0.1)], 500_000, HostMemory("cpu"), say=said.append)
    step.run(loss, torch.ones(64, 16))
    assert any("was stopped" in line for line in said)
    assert count == step.report().steps == 1
    step.remove()


def test_training_in_parts_writes_once_a_part(splits: None) -> None:
    plain, *_ = train(None, read=False)
    with pytest.warns(DifferenceWarning, match="draws its own random numbers by torch's rand"):
        ours, values, report = train(SMALL, read=False)
    assert report.sub_batches > report.steps == 4
    support.assert_close(plain, ours)
    assert values["count"] == values["calls"] == report.sub_batches


@pytest.mark.parametrize("how", ["fake", "copies", "in place"])
def test_runs_that_are_tried_out(how: str) -> None:
    global held
    held, model = Held(), Net()
    held.scale.grad = torch.ones(())
    objects, before = [held.scale.grad, held.named["inputs"]], held.values()
    batch = next(iter(loader(1)))
    step = TrainingStep(model, batch, BATCH, step_on(model, read=True), [torch.optim.Adam(model.parameters())])
    run = DryRun(step, real=how != "fake", in_place=how == "in place")
    for _ in range(2):
        run.run(OffloadPlan(BATCH))
        assert differing(before, held.values()) == []
        run.untraced()
        assert differing(before, held.values()) == []
    run.run(OffloadPlan(BATCH // 2), compare=False)
    assert differing(before, held.values()) == []
    assert all(one is two for one, two in zip(objects, [held.scale.grad, held.named["inputs"]], strict=True))


def test_a_probed_step_begins_anew_each_time() -> None:
    global held
    held, model = Held(), Net()
    held.scale.grad = torch.ones(())
    before, step, batch = held.values(), step_on(model, read=True), take(next(iter(loader(1))), 0, 4)
    with ScratchModel(model) as scratch:
        for _ in range(2):
            step(batch).backward()
            assert held.count == 1
            scratch.restart()
            assert differing({**before, "gradient": None}, held.values()) == []
        step(batch).backward()
    assert differing(before, held.values()) == []


history: list[Tensor] = []


class Remembers(Net):
    """The loss follows from those before, which are kept at module level."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        history.append(loss.detach())
        return loss * (1 + sum(history) / len(history))


@pytest.mark.parametrize("budget", [PLAIN, SMALL])
def test_a_step_that_would_use_what_a_dry_run_left_says_so(budget: int, offloads: None) -> None:
    history.clear()
    module, before = Remembers(), Remembers()
    with pytest.raises(LeftBehindError, match=r"Keep it in an attribute of the model.*dry_run='off'"):
        fit(module, MemoryBudgetStrategy(budget))
    support.assert_close(before, module, 0)


@pytest.mark.parametrize("dry_run", ["auto", "off"])
def test_no_dry_run_leaves_anything(dry_run: str) -> None:
    history.clear()
    plain = Remembers()
    fit(plain)
    expected = history.copy()
    history.clear()
    ours = Remembers()
    fit(ours, MemoryBudgetStrategy(2**30 if dry_run == "auto" else 200_000, dry_run=dry_run))
    support.assert_close(plain, ours, 0)
    assert history == expected


def own(tensor: Tensor, inputs: Tensor) -> None:
    tensor.data = tensor.detach() * 1.5


def of_inputs(tensor: Tensor, inputs: Tensor) -> None:
    tensor.data = tensor.data + inputs.detach().mean(0)


def of_its_value(tensor: Tensor, inputs: Tensor) -> None:
    tensor.data = torch.full((support.FEATURES,), float(tensor.sum()) / 8)


def larger(tensor: Tensor, inputs: Tensor) -> None:
    tensor.data = torch.ones(tensor.numel() + 1)


def set_to_inputs(tensor: Tensor, inputs: Tensor) -> None:
    tensor.set_(tensor.detach() + inputs.detach().mean(0))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("bind", [own, of_inputs, of_its_value, larger, set_to_inputs])
@pytest.mark.parametrize(("parameter", "budget"), [(False, TIGHT), (True, TIGHT), (True, PLAIN)])
def test_tensors_are_bound_to_other_memory_once_a_step(
    bind: Callable[[Tensor, Tensor], None], parameter: bool, budget: int, offloads: None
) -> None:
    def train_with(budget: int | None) -> tuple[Net, Tensor]:
        torch.manual_seed(0)
        tensor = torch.ones(support.FEATURES)
        tensor, model = nn.Parameter(tensor) if parameter else tensor, Net()

        def step(batch: Any) -> Tensor:
            with torch.no_grad():
                bind(tensor, batch[0])
            return F.cross_entropy(model(batch[0]), batch[1]) * (1 + tensor.detach().mean() + tensor.numel() / 100)

        report = run_loop(model, step, list(loader(3)), budget)
        assert report is None or report.sub_batches == 3
        return model, tensor

    (plain, expected), (ours, found) = train_with(None), train_with(budget)
    support.assert_close(plain, ours, 0)
    assert torch.equal(expected, found)
    assert type(expected) is type(found)


def test_a_binding_in_a_dry_run_says_what_to_change() -> None:
    tensor, model, batch = torch.ones(support.FEATURES), Net(), next(iter(loader(1)))

    def loss(batch: Any) -> Tensor:
        of_inputs(tensor, batch[0])
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ValueReadError, match=r"assigns to .data of a tensor that is no part of its model.*copy_"):
        profile_step(TrainingStep(model, batch, BATCH, loss))
    assert torch.equal(tensor, torch.ones(support.FEATURES))
    profile_step(TrainingStep(model, batch, BATCH, loss), real=True)
    assert torch.equal(tensor, torch.ones(support.FEATURES))


def test_only_what_was_there_before_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither activations that are written in place, nor stand-ins, nor what an optimizer keeps."""
    kept: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda one: (kept.append(one.nbytes()), clone(one))[1])
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    count = torch.zeros(3)

    def loss(batch: Tensor) -> Tensor:
        count.add_(1)
        return (model(batch) + 1).mul_(2).mean()

    step = TrainingStep(model, torch.randn(4, 8), 4, loss, [torch.optim.Adam(model.parameters())])
    for real in (False, True):
        run = DryRun(step, real=real)
        for _ in range(2):
            run.run(OffloadPlan(4))
    assert kept == [count.nbytes] * 2
