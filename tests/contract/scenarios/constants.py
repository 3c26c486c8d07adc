"""Steps that read tensors which are neither parameters nor buffers, wherever they are held; one writes them too."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contract.bench import Bench
from contract.models import FEATURES, Net
from contract.registry import fits, scenario

SCALE = torch.linspace(0.5, 1.5, FEATURES)
ORDER = torch.arange(FEATURES).flip(0)


@dataclass
class Held:
    scale: Tensor


class Criterion:
    """A loss that is no module, with its constant in the class."""

    scale = SCALE.sqrt()

    def __call__(self, errors: Tensor) -> Tensor:
        return (errors * self.scale).mean()


def scaled(scale: Tensor, errors: Tensor) -> Tensor:
    return errors * scale


def of_default(errors: Tensor, scale: Tensor = SCALE.exp()) -> Tensor:  # noqa: B008  # as users do
    return errors * scale


def in_closure() -> Callable[[Tensor], Tensor]:
    scale = SCALE.sin()
    return lambda errors: errors * scale


class HoldsConstants(Net):
    """In attributes, and in containers and objects there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.held = SCALE.clone(), Held(SCALE.square())
        self.listed, self.named = [(0, SCALE.cos())], {"a": [{"b": SCALE.tanh()}]}
        self.listed_parameters = [nn.Parameter(SCALE.clone())]
        self.scaled, self.criterion = partial(scaled, SCALE.log1p()), Criterion()

    def loss(self, batch: Any) -> Tensor:
        errors = (self(batch[0]) - batch[1]).square()
        errors = errors * self.scale * self.held.scale * self.listed[0][1] * self.named["a"][0]["b"]
        return self.criterion(self.scaled(errors) * self.listed_parameters[0].detach())


class ReadsConstants(Net):
    """Beside the model: of its file, in a closure, in an argument's default."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = in_closure()

    def loss(self, batch: Any) -> Tensor:
        errors = (self(batch[0]) - batch[1])[:, ORDER].square()
        return of_default(self.closed(errors * SCALE)).mean()


class Classes(Net):
    """Its criterion holds class weights, and was made elsewhere."""

    criterion = nn.CrossEntropyLoss(weight=SCALE.clone())

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self(batch[0]), batch[1].argmax(1))


class CountsInTensor(Net):
    """Writes into a tensor that is no buffer in each step, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros(FEATURES)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.steps.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


fits(
    constants_held_by_the_model=lambda bench: bench.fit(HoldsConstants()),
    constants_are_class_weights=lambda bench: bench.fit(Classes()),
)


@scenario()
def constants_beside_the_model(bench: Bench) -> None:
    bench.fit(ReadsConstants())
    bench.keep("constants", [SCALE, ORDER])


@scenario()
def constants_that_steps_count_in(bench: Bench) -> None:
    module = CountsInTensor()
    bench.fit(module)
    bench.keep("steps", module.steps)
