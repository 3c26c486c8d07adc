"""The floor that a refusal names is one number for every budget; below it nothing trains, and in it the step does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.mechanisms.memory_budget.dry_run.run import TrainingStep, profile_step
from retime.mechanisms.memory_budget.offload.hosts import parse_host
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import BudgetError

SAMPLES, FEATURES = 64, 32


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs.unflatten(1, (4, 8)))[0][:, -1])


def dense(*widths: int) -> nn.Sequential:
    """Linear layers with a ReLU behind each."""
    return nn.Sequential(*(layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())))


def images(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3, padding=1), *norms, nn.ReLU(), nn.Flatten()), nn.Linear(128, 4)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: dense(FEATURES, 64, 64, 4),
    "autoencoder": lambda: dense(FEATURES, 256, 3, 256, FEATURES),
    "backbone and head": lambda: nn.Sequential(dense(FEATURES, 512, 16), nn.Linear(16, 4)),
    "convolutions": images,
    "batch statistics": lambda: images(nn.BatchNorm2d(8)),
    "recurrent": Recurrent,
}


class Asked:
    """A model made anew for each budget that is asked for, as in another run."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make

    def step_of(self) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
        torch.manual_seed(0)
        model = self._make()
        return model, torch.optim.Adam(model.parameters()), torch.randn(SAMPLES, FEATURES)

    @staticmethod
    def loss(model: nn.Module, part: Tensor) -> Tensor:
        output = model(part)
        return F.mse_loss(output, part[:, : output.shape[1]])

    def plain_bytes(self) -> int:
        model, optimizer, batch = self.step_of()
        step = TrainingStep(model, batch, SAMPLES, lambda part: self.loss(model, part), [optimizer])
        return profile_step(step).peak_bytes

    def run(self, budget_bytes: int) -> dict[str, Any]:
        """A step inside a budget; the gradients."""
        model, optimizer, batch = self.step_of()
        step = BudgetedStep(model, [optimizer], budget_bytes, parse_host(None, "cpu"))
        try:
            step.run(lambda part: self.loss(model, part), batch)
        finally:
            step.remove()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def named_bytes(self, budget_bytes: int) -> int:
        with pytest.raises(BudgetError) as caught:
            self.run(budget_bytes)
        return caught.value.floor_bytes


LONG = ("backbone and head", "recurrent")


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.long) if one in LONG else one for one in MODELS])
def test_one_floor_for_every_budget(name: str) -> None:
    asked = Asked(MODELS[name])
    for _ in range(3):  # a process is counted in batches of pages, and once in 450 runs some were more
        floor = asked.named_bytes(1000)
        again = asked.named_bytes(floor - 1)
        if again == floor:
            break
    assert again == floor
    if name == "mlp":
        assert asked.named_bytes(floor // 2) == floor
    assert floor <= 1.1 * asked.plain_bytes(), "more than the plain step needs"
    inside, plain = asked.run(floor), asked.run(2**40)
    for parameter, gradient in plain.items():
        torch.testing.assert_close(inside[parameter], gradient, rtol=1e-4, atol=1e-6)
