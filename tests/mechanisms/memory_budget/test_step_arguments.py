"""Arguments of bare-loop objects for a byte budget: sizes as texts, and what cannot be meant is named at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from retime.mechanisms.memory_budget import BudgetedStep, HostMemory, OffloadSavedTensors, TrainingStep, parse_host
from retime.schedules.budget import OffloadPlan


def step(**more: Any) -> BudgetedStep:
    model = nn.Linear(2, 2)
    given: dict[str, Any] = {"budget_bytes": "1GiB", "host": HostMemory("cpu"), **more}
    return BudgetedStep(model, [torch.optim.SGD(model.parameters(), 0.1)], **given)


def test_sizes_are_texts_too(tmp_path: Path) -> None:
    built = step(budget_bytes="8GiB", reduction_bytes="1MiB")
    assert built.budget_bytes == 8 * 2**30
    built.remove()
    with parse_host(f"disk:{tmp_path}", "cpu") as host:  # type: ignore[attr-defined]
        assert OffloadSavedTensors(OffloadPlan(1), host, in_flight_bytes="1MiB").in_flight_bytes == 2**20


def training_step(**more: Any) -> TrainingStep:
    return TrainingStep(nn.Linear(2, 2), torch.ones(2, 2), 2, loss=torch.sum, **more)


@pytest.mark.parametrize(
    ("make", "wrong", "error", "says"),
    [
        (step, {"gradients": "keep"}, ValueError, r"gradients='keep'\): give 'freed' or 'freed after forward' or"),
        (step, {"host": "disk:folder"}, TypeError, r"='disk:folder' is no host tier: give parse_host\('disk:folder'"),
        (step, {"budget_bytes": "90%"}, ValueError, "budget_bytes='90%' cannot be read"),
        (training_step, {"gradients": "keep"}, ValueError, "gradients='keep' is none of"),
        (training_step, {"reduction_bytes": "much"}, ValueError, "reduction_bytes='much' cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_named(
    make: Callable[..., object], wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make(**wrong)
