"""Writes into tensors that a step reaches without asking its model - globals, closures, default arguments - are refused
where the step is only tried out, before anything is written; training then calls the step no more often than it does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retime.mechanisms.memory_budget.planner as step_planner
from retime.foundations.messages import NoEffectWarning
from retime.foundations.preserve_state import ExternalWriteError, ScratchModel
from retime.mechanisms.memory_budget.dry_run.run import DryRun, TrainingStep, take
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.separability import certify
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import OffloadPlan
from support import memory_budget as support
from support.memory_budget import BATCH, Net, loader

PLAIN, TIGHT = 700_000, 250_000  # enough for the plain step, but not without a dry run; and hardly enough
REFUSED = r"the step writes into a tensor of .* \(.* at test_outside.py:\d+\) outside of its model.*" + (
    r"keep it as a buffer of the model, or give dry_run='off'"
)


@dataclass
class Held:
    """Nothing in the model leads here."""

    count: Tensor = field(default_factory=lambda: torch.zeros(()))
    whole: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.long))
    table: Tensor = field(default_factory=lambda: torch.zeros(4, 3))
    listed: list[Tensor] = field(default_factory=lambda: [torch.zeros(2), torch.zeros(2)])
    summed: Tensor = field(default_factory=lambda: torch.empty(0))
    scale: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.ones(())))
    teacher: nn.Module = field(default_factory=lambda: nn.BatchNorm1d(support.FEATURES))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def values(self) -> dict[str, Any]:
        gradients = {"gradient": self.scale.grad, "weight's gradient": self.teacher.weight.grad}
        kept = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)} | gradients
        kept |= self.teacher.state_dict() | {str(index): one for index, one in enumerate(self.listed)}
        kept["generator"] = self.generator.get_state()
        assert all(type(one) in (Tensor, nn.Parameter, type(None)) for one in kept.values()), kept
        return {name: None if value is None else value.tolist() for name, value in kept.items()}


def differing(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    return [name for name, value in one.items() if value != two[name]]


def bind(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        tensor.data = value


WRITES: dict[str, Callable[[Held, Tensor], Any]] = {
    "add": lambda held, inputs: held.count.add_(1),
    "whole numbers": lambda held, inputs: held.whole.__iadd__(1),
    "row": lambda held, inputs: held.table[0].add_(1),
    "entry": lambda held, inputs: held.table.__setitem__(1, inputs[0, :3]),
    "data": lambda held, inputs: held.table.data[2].copy_(held.table[1]),
    "drawn": lambda held, inputs: held.table.normal_(generator=held.generator),
    "list": lambda held, inputs: torch._foreach_add_(held.listed, 1.0),
    "out": lambda held, inputs: torch.add(held.whole, 1, out=held.whole),
    "sized": lambda held, inputs: torch.sum(inputs.detach(), 0, out=held.summed),
    "of inputs": lambda held, inputs: held.count.add_(inputs.detach().sum()),
    "parameter": lambda held, inputs: held.scale.data.mul_(1.5),
    "statistics": lambda held, inputs: held.teacher(inputs),
    "bound": lambda held, inputs: bind(held.table, held.table * 1.5),
    "bound to inputs": lambda held, inputs: bind(held.table, held.table + inputs.detach()[0, :3]),
    "set": lambda held, inputs: held.table.set_(held.table + 1),
}


VIEWS = {"row", "entry", "data", "parameter"}
"""Without values a view is a copy, so nothing is written; runs with values, and probes, refuse."""


def step_on(model: nn.Module, held: Held, write: Callable[[Held, Tensor], Any]) -> Callable[[Any], Tensor]:
    """A step that writes, and whose loss follows from some of it and from a generator."""

    def step(batch: Any, given: Held = held) -> Tensor:
        with suppress(Exception):  # a step's own does not hide it
            write(given, batch[0])
        noise = torch.rand((), generator=given.generator)
        return F.cross_entropy(model(batch[0]), batch[1]) * (1 + given.count + noise + given.table.sum()) * given.scale

    return step


@pytest.mark.parametrize("how", ["fake", "copies", "in place"])
@pytest.mark.parametrize("name", WRITES)
def test_a_run_that_is_tried_out_stops_before_it_writes(name: str, how: str) -> None:
    held, model = Held(), Net()
    held.scale.grad = torch.ones(())
    before, batch = held.values(), next(iter(loader(1)))
    step = TrainingStep(model, batch, BATCH, step_on(model, held, WRITES[name]), [torch.optim.Adam(model.parameters())])
    harmless = how == "fake" and name in VIEWS
    with nullcontext() if harmless else pytest.raises(ExternalWriteError, match=REFUSED):
        DryRun(step, real=how != "fake", in_place=how == "in place").run(OffloadPlan(BATCH))
    assert differing(before, held.values()) == []


@pytest.mark.parametrize("name", [name for name in WRITES if not name.startswith("bound")])
def test_a_probe_stops_before_it_writes(name: str) -> None:
    held, model = Held(), Net()
    before, batch = held.values(), take(next(iter(loader(1))), 0, 4)
    certificate = certify(step_on(model, held, WRITES[name]), batch, model)
    assert not certificate.separable
    assert "outside of its model" in certificate.reason
    assert differing(before, held.values()) == []


def run(model: nn.Module, step: Callable[[Any], Tensor], steps: int, budget: int | None) -> Any:
    """Train plainly, or with a budget, whose report is returned."""
    optimizer, data = torch.optim.SGD(model.parameters(), 0.1), list(loader(steps))
    budgeted = None if budget is None else BudgetedStep(model, [optimizer], budget, HostMemory("cpu"))
    for batch in data:
        optimizer.zero_grad()
        step(batch).backward() if budgeted is None else budgeted.run(step, batch)
        optimizer.step()
    if budgeted is not None:
        budgeted.remove()
    return budgeted and budgeted.report()


@pytest.mark.parametrize("budget", [2**30, PLAIN, TIGHT])
@pytest.mark.parametrize("name", WRITES)
def test_training_writes_once_a_step(name: str, budget: int) -> None:
    def train(budget: int | None) -> tuple[Net, dict[str, Any], Any]:
        torch.manual_seed(0)
        held, model = Held(), Net()
        said = pytest.warns(NoEffectWarning, match=f"batches run whole, and plans follow from.*{REFUSED}")
        with nullcontext() if budget is None or (budget > TIGHT and name in VIEWS) else said:
            report = run(model, step_on(model, held, WRITES[name]), 3, budget)
        return model, held.values(), report

    (plain, expected, _), (ours, values, report) = train(None), train(budget)
    assert differing(expected, values) == []
    support.assert_close(plain, ours, 0)
    assert report.sub_batches == report.steps == 3


@pytest.mark.parametrize("write", [WRITES["add"], WRITES["bound"]])
def test_a_first_step_that_is_counted_is_stopped_before_it_writes(
    write: Callable[[Held, Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_planner, "nothing_compiled", lambda: True)  # bindings are seen only there
    model, held, said = nn.Linear(16, 16), Held(), list[str]()

    def loss(batch: Tensor) -> Tensor:
        hidden = model(batch).tanh()
        write(held, batch)
        return hidden.mean()

    step = BudgetedStep(model, [torch.optim.SGD(model.parameters(), 0.1)], 2**30, HostMemory("cpu"), say=said.append)
    with pytest.warns(NoEffectWarning, match=REFUSED):
        step.run(loss, torch.ones(64, 16))
    assert any("was stopped in its forward pass, as the step writes into a tensor" in line for line in said)
    plain = Held()
    write(plain, torch.ones(64, 16))
    assert differing(plain.values(), held.values()) == []
    step.remove()


def reads(held: Held, inputs: Tensor) -> Any:
    """Nothing is written: into what the step has made, and by a frozen teacher that is asked."""
    (held.count + 1).add_(1)
    held.teacher.eval()(inputs)
    torch.zeros(3).normal_(generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("how", ["fake", "copies", "in place"])
def test_gradients_and_generators_outside_come_back(how: str) -> None:
    held, model = Held(), Net()
    held.scale.grad = torch.ones(())
    gradient, before, batch = held.scale.grad, held.values(), next(iter(loader(1)))
    step = TrainingStep(model, batch, BATCH, step_on(model, held, reads), [torch.optim.Adam(model.parameters())])
    tried = DryRun(step, real=how != "fake", in_place=how == "in place")
    for _ in range(2):
        tried.run(OffloadPlan(BATCH))
        tried.untraced()
        assert differing(before, held.values()) == []
    tried.run(OffloadPlan(BATCH // 2), compare=False)
    assert differing(before, held.values()) == []
    assert held.scale.grad is gradient


def test_a_probed_step_finds_gradients_and_generators_anew_each_time() -> None:
    held, model = Held(), Net()
    held.scale.grad = torch.ones(())
    before, step, batch = held.values(), step_on(model, held, reads), take(next(iter(loader(1))), 0, 4)
    with ScratchModel(model) as scratch:
        losses = []
        for _ in range(2):
            losses.append(step(batch))
            losses[-1].backward()
            scratch.restart()
            assert differing({**before, "gradient": None}, held.values()) == []
        assert torch.equal(*losses)
    assert differing(before, held.values()) == []
