"""Plans that a checkpoint brings are data from outside: whatever is in them, training goes on as it would without."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.plan_files import OtherPlansError, plans_in
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError
from support import memory_budget as support
from support.memory_budget import BATCH, FEATURES, OFFLOADS, SPLITS, use_costs

pytestmark = support.IGNORED
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


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(FEATURES, FEATURES), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, 1))


def resumed(state: Any, budget: int = SMALL) -> tuple[list[torch.Tensor], dict[str, Any], BudgetedStep]:
    """A step of a run that takes up ``state``; its gradients, its own state, and what ran it."""
    model = model_of()
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


def test_a_plan_that_needs_more_than_the_budget_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, OFFLOADS)
    with pytest.warns(NoEffectWarning):
        _, roomy, _ = resumed(None, 10 * SMALL)
    entry = roomy["plans"][0]
    assert entry["tensor_bytes"] > SMALL
    lying = {**roomy, "made_for": {**roomy["made_for"], "budget_bytes": SMALL}}
    for numbers in ({}, dict.fromkeys(("peak_bytes", "tensor_bytes", "scratch_bytes"), 0)):
        _, state, step = resumed({**lying, "plans": [entry | numbers]})
        assert step.report().shapes[0].source == ""
        assert state["plans"][0]["peak_bytes"] <= SMALL


def test_what_is_dropped_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, OFFLOADS)
    for state in (None, 7, [], {"plans": []}, {"version": 99, "made_for": {}, "plans": []}):
        with pytest.warns(NoEffectWarning) as said:
            resumed(state)
        assert len(said) == 1


def test_a_plan_of_too_many_storages_is_none() -> None:
    for text in PLANS[:6]:
        with pytest.raises(ScheduleError) as caught:
            OffloadPlan.parse(text)
        assert len(str(caught.value)) < 300
