"""What a memory budget refuses, and what it says then."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from retime.mechanisms.memory_budget.offload.tier import HostError
from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import SMALL, Net, assert_close, fit

pytestmark = support.IGNORED


def test_a_refused_budget_trains_nothing(splits: None) -> None:
    module, seen = Net(), support.Steps()
    with pytest.raises(BudgetError, match=r"at least \d+ bytes.* are needed at task") as caught:
        fit(module, MemoryBudgetStrategy(2_000), callbacks=[seen])
    assert caught.value.layer
    assert seen.steps == 0
    assert_close(Net(), module, 0)
    assert all(parameter.grad is None for parameter in module.parameters())


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.parametrize(
    ("module", "pattern"), [(Manual, "needs automatic optimization"), (Iterates, r"training_step\(batch, batch_idx\)")]
)
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_steps_that_cannot_be_planned(module: type[Net], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        fit(module(), MemoryBudgetStrategy(SMALL))


@pytest.mark.parametrize(
    ("options", "more", "pattern"),
    [
        ({}, {"devices": 2}, "use devices=1"),
        ({"host": "disk:/nowhere/missing"}, {}, "missing"),
        ({"budget": "900TiB"}, {}, "give at most that"),
        ({"host": "memory"}, {}, "frees nothing when"),
    ],
    ids=["devices", "folder", "budget", "host"],
)
def test_what_cannot_be_had(options: dict[str, Any], more: dict[str, Any], pattern: str) -> None:
    with pytest.raises((ValueError, HostError), match=pattern):
        fit(Net(), MemoryBudgetStrategy(**{"budget": SMALL} | options), **more)


def test_the_reason_is_given_when_a_batch_cannot_be_split(splits: None) -> None:
    class Strange(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["pair"])

    batch = {"pair": (torch.randn(8, 16), torch.zeros(8).long()), "odd": torch.zeros(3)}
    with pytest.raises(ValueError, match="split_batch"):
        fit(Strange(), MemoryBudgetStrategy(SMALL), data=DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
