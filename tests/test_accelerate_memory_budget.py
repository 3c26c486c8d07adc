"""MemoryBudget for Accelerate: the same weights as the plain loop's, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from memory_budget_support import OFFLOADS, SPLITS, Net, assert_close, loader, use_costs
from retime.integrations.accelerate import MemoryBudget
from retime.schedules.memory.errors import BudgetError

SMALL = 130_000


def train(how: str, accumulate: int = 1, budget: int = SMALL) -> tuple[Net, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(module, optimizer, loader(5))
    kept = MemoryBudget(accelerator, model, optimizer, budget)

    def step(batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.net(batch[0]), batch[1])

    try:
        for batch in data:
            with accelerator.accumulate(model):
                if how == "run":
                    kept.run(step, batch)
                elif how == "forward":
                    with kept.forward(step, batch):
                        loss = step(batch)
                    accelerator.backward(loss)
                    del loss
                else:
                    accelerator.backward(step(batch))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return module, kept.report()
    finally:
        kept.remove()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_around_forward_passes(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    use_costs(monkeypatch, SPLITS)  # sub-batches would be faster, but a loop of one's own cannot have them
    plain, _ = train("plain", accumulate)
    ours, (report,) = train("forward", accumulate)
    assert report.offload.storages > 0
    assert report.sub_batches == report.steps == 5
    assert_close(plain, ours, 0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_a_step_function(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    use_costs(monkeypatch, SPLITS)
    plain, _ = train("plain", accumulate)
    ours, (report,) = train("run", accumulate)
    assert report.sub_batches > report.steps == 5
    assert_close(plain, ours)


def test_a_budget_below_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, OFFLOADS)
    with pytest.raises(BudgetError, match="below this step's floor"):
        train("forward", budget=60_000)  # sub-batches would fit


def test_needs_the_prepared_optimizer() -> None:
    module = Net()
    with pytest.raises(TypeError, match=r"apply MemoryBudget after accelerator\.prepare"):
        MemoryBudget(Accelerator(cpu=True), module, torch.optim.SGD(module.parameters(), lr=0.1), SMALL)


def test_plans_are_kept_with_the_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_costs(monkeypatch, OFFLOADS)

    def step(batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.net(batch[0]), batch[1])

    notes = []
    for resumed in (False, True):
        accelerator = Accelerator(cpu=True)
        module = Net()
        model, optimizer, data = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), loader(1))
        kept = MemoryBudget(accelerator, model, optimizer, SMALL)
        if resumed:
            accelerator.load_state(str(tmp_path))
        for batch in data:
            kept.run(step, batch)
        accelerator.save_state(str(tmp_path))
        notes.append(kept.report()[0].shapes[0].note)
        kept.remove()
    assert notes == ["", "plan of an earlier run"]
