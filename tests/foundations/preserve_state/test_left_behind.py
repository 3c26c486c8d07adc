"""A tensor of a dry run that a step has left outside of its model does not get into training."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from retime.foundations.messages import NoEffectWarning
from retime.foundations.preserve_state.stand_ins import LeftBehindError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import Net, fit

pytestmark = support.IGNORED
PLANNED, TIGHT = 700_000, 250_000

history: list[Tensor] = []


class Hides(Net):
    """The loss follows from those before, which are kept at module level; by another name where that is written."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.keep(loss.detach())
        return loss * (1 + sum(history) / len(history))

    def keep(self, loss: Tensor) -> None:
        kept = history
        kept.append(loss)


class Remembers(Hides):
    def keep(self, loss: Tensor) -> None:
        history.append(loss)


@pytest.mark.parametrize("budget", [PLANNED, TIGHT])
def test_the_step_that_would_use_it_says_so(budget: int, offloads: None) -> None:
    history.clear()
    module, before = Hides(), Hides()
    with pytest.raises(LeftBehindError, match=r"Keep it in an attribute of the model.*dry_run='off'"):
        fit(module, MemoryBudgetStrategy(budget))
    support.assert_close(before, module, 0)


@pytest.mark.parametrize(("budget", "dry_run"), [(2**30, "auto"), (PLANNED, "auto"), (TIGHT, "auto"), (TIGHT, "off")])
def test_nothing_is_left_where_the_code_shows_it(budget: int, dry_run: str, recwarn: pytest.WarningsRecorder) -> None:
    history.clear()
    plain = Remembers()
    fit(plain)
    expected = history.copy()
    history.clear()
    ours = Remembers()
    fit(ours, MemoryBudgetStrategy(budget, dry_run=dry_run))
    support.assert_close(plain, ours, 0)
    assert history == expected
    told = [one for one in recwarn if issubclass(one.category, NoEffectWarning)]
    assert len(told) == (dry_run == "auto" and budget <= PLANNED)
    assert all("changes history" in str(one.message) and "test_left_behind.py:38" in str(one.message) for one in told)
