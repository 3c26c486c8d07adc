"""Plans in files, and plans that no clock has a part in: the same script trains the same way in every run."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from retime.mechanisms.memory_budget.plan_files import PlanFileError
from retime.mechanisms.memory_budget.search import PlanTrial
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import Net, ShallowNet, accelerate_loop, assert_close, fit, loader, report_of

pytestmark = support.IGNORED
BUDGET = 110_000  # either way is enough


@pytest.fixture
def lying_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other times in each run, whatever is timed."""
    clock = random.Random()
    for name in ("perf_counter", "perf_counter_ns", "process_time", "thread_time"):
        monkeypatch.setattr(time, name, lambda: clock.randrange(10**9))


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Lightning switches on for ``deterministic=True`` is switched off again."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


def dropping() -> Net:
    module = ShallowNet()
    for index, layer in enumerate(module.net):
        if type(layer) is nn.Tanh:
            module.net[index] = nn.Sequential(layer, nn.Dropout(0.2))
    return module


def test_deterministic_training_asks_no_clock(
    lying_clocks: None, deterministic: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_trial(*_: Any) -> Any:
        raise AssertionError("a plan was timed")

    monkeypatch.setattr(PlanTrial, "step_ms", no_trial)
    runs = []
    for _ in range(2):
        caplog.clear()
        module = dropping()
        done = fit(module, MemoryBudgetStrategy(BUDGET), data=loader(2), deterministic=True)
        runs.append((module, str(report_of(done).shapes[0].choice)))
        assert sum("every run chooses the same" in line for line in caplog.messages) == 1
    assert runs[0][1] == runs[1][1]
    assert_close(runs[0][0], runs[1][0], 0)


def saved(path: Path, **options: Any) -> Net:
    module = dropping()
    strategy = MemoryBudgetStrategy(BUDGET)
    fit(module, strategy, data=loader(2), **options)
    strategy.save_plan(path)
    return module


def test_a_plan_that_is_given_is_the_plan(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved(tmp_path / "plan.json")
    support.use_costs(monkeypatch, support.WAYS["sub-batches" if way == "offload" else "offload"])
    again = dropping()
    done = fit(again, MemoryBudgetStrategy(BUDGET, plan=tmp_path / "plan.json"), data=loader(2))
    (shape,) = report_of(done).shapes
    support.assert_way(report_of(done), way)
    assert f"plan of {tmp_path / 'plan.json'}" in str(shape)
    assert_close(first, again, 0)


def test_a_plan_that_does_not_fit_is_an_error_before_the_first_step(offloads: None, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    saved(file)
    state = json.loads(file.read_text())

    def refused(match: str, budget: int = BUDGET, data: Any = None, module: Net | None = None) -> None:
        module = module or dropping()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(PlanFileError, match=match):
            fit(module, MemoryBudgetStrategy(budget, plan=file), data=data or loader(2))
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())

    refused(rf"made for budget_bytes {BUDGET}, not {BUDGET + 1}", BUDGET + 1)
    refused("its plan is for batches of 256", data=loader(1, batch=257))
    refused("made for model", module=Net(width=17, depth=4))
    other = dropping()
    other.loss = lambda batch: F.cross_entropy(other.net(batch[0]).tanh().exp(), batch[1])  # type: ignore[method-assign]
    refused("the step saves other storages", module=other)
    state["plans"][0]["samples"] = -1
    file.write_text(json.dumps(state))
    refused("samples is -1")
    state["plans"].clear()
    file.write_text(json.dumps(state))
    refused("it has no plan for this shape")
    file.write_text("{")
    with pytest.raises(PlanFileError, match=r"is no file of plans.*retime plan --save"):
        MemoryBudgetStrategy(BUDGET, plan=file)
    with pytest.raises(FileNotFoundError):
        MemoryBudgetStrategy(BUDGET, plan=tmp_path / "none.json")


def test_a_given_plan_needs_no_dry_run(offloads: None, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    first = saved(file)
    calls: list[int] = []

    class Counting(type(dropping())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    again = dropping()
    again.__class__ = Counting
    Counting.__name__ = "ShallowNet"
    fit(again, MemoryBudgetStrategy(BUDGET, plan=file, dry_run="off"), data=loader(2))
    assert calls == [0, 1]
    assert_close(first, again, 0)


def test_accelerate_takes_a_plan(offloads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    first, *_ = accelerate_loop("run", 1, BUDGET, module=ShallowNet(), plan_to=file)
    support.use_costs(monkeypatch, support.SPLITS)
    again, (report,), _ = accelerate_loop("run", 1, BUDGET, module=ShallowNet(), plan=file)
    assert report.sub_batches == report.steps
    assert_close(first, again, 0)
