"""A tensor of a dry run that a step has left outside of its model does not get into training."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from retime.foundations.preserve_state.stand_ins import LeftBehindError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import Net, fit

pytestmark = support.IGNORED
PLANNED, SMALL = 700_000, support.SMALL

history: list[Tensor] = []


class Remembers(Net):
    """The loss follows from those before, which are kept at module level."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        history.append(loss.detach())
        return loss * (1 + sum(history) / len(history))


@pytest.mark.parametrize("budget", [PLANNED, SMALL])
def test_the_step_that_would_use_it_says_so(budget: int, offloads: None) -> None:
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
