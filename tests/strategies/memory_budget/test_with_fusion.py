"""FuseOptimizer beside a memory budget: forward mode works, backward mode steps aside."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from retime.callbacks import FuseOptimizer
from retime.foundations.messages import NoEffectWarning
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import SHALLOW, ShallowNet, assert_same, assert_way, fit, report_of

pytestmark = support.IGNORED


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        *(("offload", "backward"), ("sub-batches", "forward")),
        pytest.param("offload", "forward", marks=pytest.mark.long),
        pytest.param("sub-batches", "backward", marks=pytest.mark.long),
    ],
    indirect=["way"],
)
def test_beside_a_budget(way: str, mode: Any) -> None:
    plain, ours, fused = ShallowNet(), ShallowNet(), FuseOptimizer(mode)
    fit(plain)
    aside = pytest.warns(NoEffectWarning, match="several backward passes")
    with aside if mode == "backward" else contextlib.nullcontext():
        done = fit(ours, MemoryBudgetStrategy(SHALLOW), callbacks=[fused])
    assert bool(fused.report().fused_updates) is (mode == "forward")
    assert_way(report_of(done), way)
    assert_same(plain, ours, way)
