"""``trainer.strategy.report()`` after a fit in processes that have ended."""

import os
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import retime
from support.paths import PYTHONPATH, SUPPORT
from support.time_limits import limit_s
from support.warm_start import Warm


@pytest.mark.long
def test_rank_zeros_report_comes_home(tmp_path: Path) -> None:
    ours = ("cpu_accumulate_ddp_fork", "cpu_accumulate_ddp_spawn")
    names = ("fused_optimizer_ddp_fork", "memory_budget_ddp_fork", *ours)
    script = str(SUPPORT / "reporting_launcher_worker.py")
    out, errors = tmp_path / "out", tmp_path / "errors"
    with Warm(script, [str(tmp_path), *names], {**os.environ, **PYTHONPATH}, out, errors) as fits:
        fits.wait(limit_s(200))
    printed, said = out.read_text(), errors.read_text()[-3000:]
    assert "fused_optimizer_ddp_fork: FusionReport of 4 steps" in printed, said
    assert "memory_budget_ddp_fork: BudgetReport of 4 steps" in printed, said
    for name in ours:
        assert f"{name}: HostReductionReport of gradients on the host: 4 buckets" in printed, said
    assert printed.count("2 ranks in shared memory") == (2 if sys.platform == "linux" else 0)


def test_every_strategy_of_several_processes_has_names_that_start_them() -> None:
    for name in ("fused_optimizer_ddp", "ooo_ddp", "memory_budget_ddp", "cpu_accumulate_ddp"):
        for start in ("popen", "spawn", "fork"):
            full = name if start == "popen" else f"{name}_{start}"
            assert isinstance(StrategyRegistry.get(full), retime.strategies.support.base.ReportsAcrossProcesses)
            assert StrategyRegistry[full]["init_params"]["start_method"] == start
