"""Plans in files, plans that no clock has a part in, and plans of checkpoints, which are data from outside."""

import copy
import json
import math
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.plan_files import OtherPlansError, PlanFileError, plans_in
from retime.mechanisms.memory_budget.search import PlanTrial
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import (
    BATCH,
    FEATURES,
    OFFLOADS,
    SPLITS,
    Net,
    ShallowNet,
    accelerate_loop,
    assert_close,
    fit,
    loader,
    model_of,
    report_of,
    use_costs,
)

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


SMALL = 80_000  # the plain step needs 101,700 bytes, whole batches that offload 71,100

ODD: list[Any] = [
    *(None, True, -1, 0, 10**9, 10**400, 0.5, math.nan, math.inf, "", "x" * 10_000),
    *([], [[[]]], {}, {"a": {"b": [1]}}, torch.zeros(2)),
]
PLANS = [
    "sub-batch 1, prefetch 0, offload 0-1000000000 of 2000000000",
    "sub-batch 1, prefetch 0, offload all of 1000000000",
    f"sub-batch {10**30}, prefetch 0, offload none of 0",
    f"sub-batch {'9' * 5000}, prefetch 0, offload none of 0",
    "sub-batch 256, prefetch 0, offload 5-2 of 17",
    f"sub-batch 256, prefetch 0, offload {'0-9,' * 100}0-9 of 17",
    "sub-batch 0, prefetch 0, offload none of 17",
    "sub-batch 256, prefetch 0, offload none of 17",
    "sub-batch 256, prefetch 100000, offload 0-16 of 17",
    "sub-batch 256, prefetch 0, offload all of 18",
    "sub-batch 1, prefetch 0, offload none of 17",
    "sub-batch 100, prefetch 0, offload 0 of 17",
    "sub-batch 1000, prefetch 0, offload 0 of 17",
    "os.system('true')",
]


def resumed(state: Any, budget: int = SMALL) -> tuple[list[torch.Tensor], dict[str, Any], BudgetedStep]:
    """A step of a run that takes up ``state``; its gradients, its own state, and what ran it."""
    model = model_of(depth=3)
    batch = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(1))
    step = BudgetedStep(model, [torch.optim.SGD(model.parameters())], budget, HostMemory("cpu"))
    step.load_state_dict(state)
    step.run(lambda part: model(part).square().mean(), batch)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    kept = step.state_dict()
    step.remove()
    return gradients, kept, step


def changed(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The state with each of its leaves, lists and mappings deleted, renamed or replaced."""
    here = state
    for name in path:
        here = here[name]
    for odd in ODD:
        yield path, replaced(state, path, odd)
    if isinstance(here, dict):
        yield (*path, "more"), replaced(state, path, here | {"more": 1})
        yield (*path, 7), replaced(state, path, here | {7: 1})
        for name in here:
            yield (*path, name, "gone"), replaced(state, path, {key: here[key] for key in here if key != name})
    for name in here if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ():
        yield from changed(state, (*path, name))
    if path and path[-1] == "plan":
        yield from ((path, replaced(state, path, text)) for text in PLANS)


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(state)
    holder = changed
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("costs", "few"),
    [pytest.param(OFFLOADS, (), marks=pytest.mark.long), (SPLITS, ("plan", "samples"))],
    ids=["all", "sub-batches"],
)
def test_a_changed_state_never_changes_training(monkeypatch: pytest.MonkeyPatch, costs: Any, few: Any) -> None:
    """Most changes are found by what a state has to look like; with the others a step runs as with the right one."""
    use_costs(monkeypatch, costs)
    with pytest.warns(NoEffectWarning, match="plans of an earlier run have no effect"):
        _, state, _ = resumed(None)
    right, again, _ = resumed(state)
    assert again == state
    believed, lengths = 0, [0]
    for path, other in changed(state):
        try:
            plans_in(other, state["made_for"])
        except OtherPlansError:
            continue
        except ScheduleError as error:
            lengths.append(len(str(error)))
            continue
        if path[-1] in ("step_ms", "plain_ms", "note", "shape"):
            continue  # nothing but what is printed, or never found
        if few and path[-1] not in few:
            continue
        believed += 1
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gradients, _, step = resumed(other)
        assert len(said) <= 1, path
        assert step.report().shapes[0].choice.peak_bytes <= SMALL, path
        for one, two in zip(right, gradients, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7, msg=str(path))
    assert 5 < believed < 80
    assert max(lengths) < 500


def test_a_plan_that_needs_more_than_the_budget_is_not_taken(offloads: None) -> None:
    with pytest.warns(NoEffectWarning):
        _, roomy, _ = resumed(None, 10 * SMALL)
    entry = roomy["plans"][0]
    assert entry["tensor_bytes"] > SMALL
    lying = {**roomy, "made_for": {**roomy["made_for"], "budget_bytes": SMALL}}
    for numbers in ({}, dict.fromkeys(("peak_bytes", "tensor_bytes", "scratch_bytes"), 0)):
        _, state, step = resumed({**lying, "plans": [entry | numbers]})
        assert step.report().shapes[0].source == ""
        assert state["plans"][0]["peak_bytes"] <= SMALL


def test_what_is_dropped_is_said_once(offloads: None) -> None:
    for state in (None, 7, [], {"plans": []}, {"version": 99, "made_for": {}, "plans": []}):
        with pytest.warns(NoEffectWarning) as said:
            resumed(state)
        assert len(said) == 1


def test_a_plan_of_too_many_storages_is_none() -> None:
    for text in (*PLANS[:6], "sub-batch 4, prefetch 1, offload all"):
        with pytest.raises(ScheduleError) as caught:
            OffloadPlan.parse(text)
        assert len(str(caught.value)) < 300
