"""Plans of a memory budget in checkpoints: used again, certified again, and ignored by other strategies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

import retime.mechanisms.memory_budget.planner as step_planner
from retime.foundations.messages import NoEffectWarning
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import OFFLOAD_LATER, SHALLOW, Net, ShallowNet, assert_same, loader, report_of, trainer

pytestmark = support.IGNORED


def train(strategy: Any, path: Path, epochs: int, resume: Path | None = None) -> tuple[Net, Trainer]:
    module = ShallowNet()
    runner = trainer(strategy, max_epochs=epochs)
    runner.fit(module, loader(), ckpt_path=resume, weights_only=False if resume else None)
    runner.save_checkpoint(path)
    return module, runner


def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: Any, **__: Any) -> Any:
        raise AssertionError("searched again")

    monkeypatch.setattr(step_planner, "search_plan", search)


@OFFLOAD_LATER
def test_a_resumed_run_searches_again_for_another_budget_only(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = train(MemoryBudgetStrategy(SHALLOW), tmp_path / "one.ckpt", 1)
    planned = report_of(first).shapes[0]
    kept = torch.load(tmp_path / "one.ckpt", weights_only=True)["retime_memory_budget"]
    assert (kept["made_for"]["budget_bytes"], kept["made_for"]["batchnorm"]) == (SHALLOW, "offload")
    assert kept["plans"][0]["plan"] == str(planned.choice.plan)
    assert kept["plans"][0]["samples"] == support.BATCH

    _, other = train(MemoryBudgetStrategy(SHALLOW + 20_000), tmp_path / "other.ckpt", 2, tmp_path / "one.ckpt")
    assert "earlier run" not in report_of(other).one_line
    plain, _ = train("auto", tmp_path / "plain.ckpt", 2)
    no_search(monkeypatch)
    ours, second = train(MemoryBudgetStrategy(SHALLOW), tmp_path / "two.ckpt", 2, tmp_path / "one.ckpt")
    again = report_of(second).shapes[0]
    assert again.choice.plan == planned.choice.plan
    assert (again.certificate is not None) == (way == "sub-batches")
    assert "plan of an earlier run" in str(again)
    assert_same(plain, ours, way)
    _, third = train(MemoryBudgetStrategy(SHALLOW), tmp_path / "three.ckpt", 3, tmp_path / "two.ckpt")
    assert str(report_of(third).shapes[0]).count("plan of an earlier run") == 1


@OFFLOAD_LATER
def test_another_model_is_planned_for(way: str) -> None:
    done = trainer(MemoryBudgetStrategy(SHALLOW))
    done.fit(Net(depth=2), loader())
    done.fit_loop.max_epochs = 3
    for width, planned_again in ((17, True), (17, False)):
        done.fit(Net(width=width, depth=2), loader())
        assert ("earlier run" not in report_of(done).one_line) == planned_again
        done.fit_loop.max_epochs += 1


def test_a_checkpoint_whose_plans_were_changed_is_resumed(offloads: None, tmp_path: Path) -> None:
    train(MemoryBudgetStrategy(SHALLOW), tmp_path / "one.ckpt", 1)
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=False)
    checkpoint["retime_memory_budget"]["plans"][0]["plan"] = (
        "sub-batch 256, prefetch 0, offload 0-1000000000 of 1000000001"
    )
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    plain, _ = train(MemoryBudgetStrategy(SHALLOW), tmp_path / "two.ckpt", 2, tmp_path / "one.ckpt")
    with pytest.warns(NoEffectWarning, match="plans of an earlier run have no effect") as said:
        ours, _ = train(MemoryBudgetStrategy(SHALLOW), tmp_path / "two.ckpt", 2, tmp_path / "changed.ckpt")
    assert sum(one.category is NoEffectWarning for one in said) == 1
    assert_same(plain, ours, "offload")
