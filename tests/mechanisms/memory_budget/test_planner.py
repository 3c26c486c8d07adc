"""What a planner says while it plans, and what its refusals advise."""

from typing import Any

import pytest
import torch
from torch import nn

from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import BudgetError
from support.memory_budget import OFFLOADS, SPLITS, Net, loader, norm, use_costs

pytestmark = pytest.mark.usefixtures("splits")


def refusal(model: nn.Module, batch: Any, whole_because: str = "", **options: Any) -> str:
    step = BudgetedStep(model, [], 30_000, HostMemory("cpu"), whole_because=whole_because, **options)
    try:
        with pytest.raises(BudgetError) as caught:
            step.plan(lambda part: model(part).square().mean(), batch)
    finally:
        step.remove()
    assert "smaller sub-batches" not in str(caught.value), "they are not allowed"
    return str(caught.value)


def images(*more: nn.Module, width: int = 8) -> tuple[nn.Module, torch.Tensor]:
    """A network that is largest in its middle, not in its loss."""
    return nn.Sequential(nn.Conv2d(3, width, 3), *more, nn.AdaptiveAvgPool2d(1)), torch.randn(16, 3, 32, 32)


def test_ghost_statistics_are_advised() -> None:
    said = refusal(*images(nn.BatchNorm2d(8), nn.Conv2d(8, 64, 3)))
    assert "Sub-batches would lower it, but BatchNorm in train mode" in said
    assert "choose batchnorm='ghost', or a smaller batch" in said


def test_ghost_says_what_the_fewest_samples_need() -> None:
    model, batch = images(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64))
    said = refusal(model, batch, batchnorm="ghost")
    assert "for 2 samples: smaller samples would help" in said or "for 3 samples: smaller" in said


def test_without_sub_batches_it_says_how_to_have_them() -> None:
    said = refusal(*images(nn.ReLU()), sub_batches=False)
    assert "Batches are only offloaded here: run(), which may split them" in said


def test_offloading_only_is_no_advice_where_it_is_not_enough() -> None:
    class Contrasts(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * value.mean(0)

    said = refusal(*images(Contrasts()))
    assert "samples of a batch influence one another" in said
    assert "A smaller batch would help" in said
    assert "ffload only" not in said


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("it is so; offload only", "but it is so. A smaller batch"),
        ("it is so; change it, or offload only", "but it is so; change it. A smaller batch"),
        ("it is so. Offload only", "but it is so. A smaller batch"),
        ("it is so; offload only, or change it", "but it is so; change it. A smaller batch"),
    ],
)
def test_other_advice_is_kept(reason: str, said: str) -> None:
    assert said in refusal(*images(nn.ReLU()), whole_because=reason)


@pytest.mark.parametrize(("costs", "tried"), [(SPLITS, True), (OFFLOADS, False)])
def test_the_longest_parts_of_planning_are_said(monkeypatch: pytest.MonkeyPatch, costs: Any, tried: bool) -> None:
    use_costs(monkeypatch, costs)
    said: list[str] = []
    monkeypatch.setattr(
        "support.memory_budget.step_planner.calibrate", lambda *_, **__: said.append("CALIBRATES") or costs
    )
    monkeypatch.setattr("support.memory_budget.step_planner.PlanTrial.step_ms", lambda *_: said.append("TRIES") or 1.0)
    net = Net(None if tried else norm)
    step = BudgetedStep(net, [], 100_000, HostMemory("cpu"), say=said.append)
    shape = step.plan(net.loss, next(iter(loader())))
    step.remove()
    at = said.index("CALIBRATES")
    assert said[at - 1].startswith("measuring on a few samples")
    rounds = [index for index, text in enumerate(said) if text == "TRIES"]
    assert bool(rounds) == tried
    for number, index in enumerate(rounds, 1):
        assert said[index - 1].startswith(f"trying plan {number}: sub-batch ")
    assert said[-1] == str(shape)
