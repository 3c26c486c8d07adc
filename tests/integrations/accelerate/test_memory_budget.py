"""MemoryBudget for Accelerate: the same weights as the plain loop's, within a budget."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from retime.integrations.accelerate import MemoryBudget
from retime.mechanisms.memory_budget.report import BudgetReport
from retime.schedules.budget import BudgetError
from support.memory_budget import SHALLOW, SMALL, TINY, Net, ShallowNet, accelerate_loop, assert_close, loader

ACCUMULATE = pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])


def shallow_loop(how: str, accumulate: int) -> tuple[Net, list[BudgetReport], dict[str, Any]]:
    return accelerate_loop(how, accumulate, SHALLOW, module=ShallowNet(), data=loader(5))


@ACCUMULATE
def test_around_forward_passes(splits: None, accumulate: int) -> None:
    # sub-batches would be faster, but a loop of one's own cannot have them
    plain, *_ = shallow_loop("plain", accumulate)
    ours, (report,), _ = shallow_loop("forward", accumulate)
    assert report.offload.storages > 0
    assert report.sub_batches == report.steps == 5
    assert_close(plain, ours, 0)


@ACCUMULATE
def test_with_a_step_function(splits: None, accumulate: int) -> None:
    plain, *_ = shallow_loop("plain", accumulate)
    ours, (report,), _ = shallow_loop("run", accumulate)
    assert report.sub_batches > report.steps == 5
    assert_close(plain, ours)


def test_the_report_prints_as_text() -> None:
    accelerator = Accelerator(cpu=True)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    budget = MemoryBudget(accelerator, *accelerator.prepare(module, optimizer), "1GiB")
    assert "nothing is planned" in str(budget.report())
    for kind in ("_parts", "_whole"):
        setattr(budget, kind, budget._make(split_too=kind == "_parts"))
    assert budget.report().what_was_done() == ["memory budget 1 GiB: 0 steps in 0 sub-batches"] * 2
    assert str(budget.report()).splitlines()[0] == budget.report().headline
    assert [report.steps for report in budget.report()] == [0, 0]
    budget.remove()


def test_a_budget_below_the_floor(offloads: None) -> None:
    with pytest.raises(BudgetError, match="below this step's floor"):
        accelerate_loop("forward", budget=TINY)  # sub-batches would fit


def test_needs_the_prepared_optimizer() -> None:
    module = Net()
    with pytest.raises(TypeError, match=r"apply MemoryBudget after accelerator\.prepare"):
        MemoryBudget(Accelerator(cpu=True), module, torch.optim.SGD(module.parameters(), lr=0.1), SMALL)
