"""Plain tensors that a step reads, however it reaches them: dry runs follow it, nothing replaces or changes them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from retime.mechanisms.memory_budget.dry_run.run import EVERYTHING, TrainingStep, profile_step, replay
from retime.schedules.budget import OffloadPlan

SAMPLES, WIDTH = 8, 5
SCALE = torch.arange(1.0, WIDTH + 1)
ORDER = torch.arange(WIDTH).flip(0)
EDITED = torch.ones(WIDTH).add_(1).mul_(2)  # its version is not 0
EVERY_WAY = OffloadPlan(SAMPLES, EVERYTHING, saved=len(EVERYTHING))


@dataclass
class Held:
    scale: Tensor


class Outer:
    def __init__(self, held: Held) -> None:
        self.held = held


class OfClass:
    scale = SCALE.clone()

    def __call__(self, values: Tensor) -> Tensor:
        return values * self.scale


def scaled(scale: Tensor, values: Tensor) -> Tensor:
    return values * scale


def of_default(values: Tensor, scale: Tensor = SCALE.clone()) -> Tensor:  # noqa: B008  # as users do
    return values * scale


def in_closure() -> Callable[[Tensor], Tensor]:
    scale = SCALE.clone()
    return lambda values: values * scale


class Reading(nn.Module):
    """Reads a constant in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        scale = SCALE.clone()
        self.constant, self.held, self.outer = scale, Held(scale.clone()), Outer(Held(scale.clone()))
        self.listed, self.nested = [(0, scale.clone())], {"a": [{"b": scale.clone()}]}
        self.parameters_in_list = [nn.Parameter(scale.clone())]
        self.partial, self.closure, self.of_class = partial(scaled, scale.clone()), in_closure(), OfClass()
        self.read: Callable[[Tensor], Tensor] = READ[way](self)

    def forward(self, values: Tensor) -> Tensor:
        return self.read(self.linear(values).tanh())


READ: dict[str, Callable[[Reading], Callable[[Tensor], Tensor]]] = {
    "attribute": lambda model: lambda values: values * model.constant,
    "dataclass": lambda model: lambda values: values * model.held.scale,
    "object in object": lambda model: lambda values: values * model.outer.held.scale,
    "tuple in list": lambda model: lambda values: values * model.listed[0][1],
    "nested containers": lambda model: lambda values: values * model.nested["a"][0]["b"],
    "parameter in list": lambda model: lambda values: values * model.parameters_in_list[0],
    "partial": lambda model: lambda values: model.partial(values),
    "closure": lambda model: model.closure,
    "class attribute": lambda model: model.of_class,
    "default argument": lambda model: of_default,
    "global": lambda model: lambda values: values * SCALE,
    "edited global": lambda model: lambda values: values * EDITED,
    "global index": lambda model: lambda values: values[:, ORDER],
}


@dataclass
class Step:
    """What is compared before and after a dry run."""

    model: Reading
    dry: TrainingStep

    def loss(self) -> Tensor:
        return self.dry.loss(self.dry.batch).detach()


def step_of(way: str, criterion: Callable[..., Tensor] = cross_entropy) -> Step:
    torch.manual_seed(0)
    model = Reading(way)
    batch = torch.randn(SAMPLES, WIDTH), torch.randint(WIDTH, (SAMPLES,))

    def loss(part: Any) -> Tensor:
        return criterion(model(part[0]), part[1])

    return Step(model, TrainingStep(model, batch, SAMPLES, loss, [torch.optim.SGD(model.parameters(), lr=0.1)]))


@pytest.mark.parametrize("way", READ)
def test_steps_that_read_constants_can_be_offloaded_in_a_dry_run(way: str) -> None:
    step = step_of(way)
    before, constants = step.loss(), [SCALE.clone(), EDITED.clone(), ORDER.clone()]
    dry = replay(step.dry, EVERY_WAY, compare=False)
    real = replay(step.dry, EVERY_WAY, compare=False, real=True)
    assert (len(dry.saved), dry.peak_bytes) == (len(real.saved), real.peak_bytes)
    assert torch.equal(step.loss(), before)
    assert all(torch.equal(now, then) for now, then in zip([SCALE, EDITED, ORDER], constants, strict=True))


@pytest.mark.parametrize("where", ["criterion", "argument"])
def test_a_criterion_with_class_weights_from_outside_the_model(where: str) -> None:
    weight = SCALE.clone()
    criterion = nn.CrossEntropyLoss(weight=weight) if where == "criterion" else partial(cross_entropy, weight=weight)
    step = step_of("attribute", criterion)
    before = step.loss()
    dry, plain = replay(step.dry, EVERY_WAY, compare=False), profile_step(step.dry)
    assert len(dry.saved) == len(plain.saved)
    assert torch.equal(step.loss(), before)
