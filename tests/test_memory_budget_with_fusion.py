"""FuseOptimizer beside a memory budget: forward mode works, backward mode steps aside."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import memory_budget_support as support
from memory_budget_support import OFFLOADS, SPLITS, Net, assert_close, fit, report_of, use_costs
from retime.callbacks import FuseOptimizer
from retime.mechanisms.memory.costs import StepCosts
from retime.mechanisms.no_effect import NoEffectWarning
from retime.strategies import MemoryBudgetStrategy

pytestmark = support.IGNORED
SMALL = 120_000


@pytest.mark.parametrize("mode", ["backward", "forward"])
@pytest.mark.parametrize("costs", [SPLITS, OFFLOADS], ids=["sub-batches", "offload"])
def test_beside_a_budget(monkeypatch: pytest.MonkeyPatch, costs: StepCosts, mode: Any) -> None:
    use_costs(monkeypatch, costs)
    plain, ours, fused = Net(), Net(), FuseOptimizer(mode)
    fit(plain)
    aside = pytest.warns(NoEffectWarning, match="several backward passes")
    with aside if mode == "backward" else contextlib.nullcontext():
        done = fit(ours, MemoryBudgetStrategy(SMALL), callbacks=[fused])
    assert bool(fused.report().fused_updates) is (mode == "forward")
    assert (report_of(done).sub_batches > 3) is (costs is SPLITS)
    assert_close(plain, ours, 1e-5 if costs is SPLITS else 0)
