"""Two copies of a model with one layer in the middle, one of them with weight gradients that wait."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.weight_gradients import WeightGradientDeferral

WIDTH = 160
"""Wide enough that a square weight is not small."""


class Own(nn.Module):
    """A layer with one weight; ``use(x, weight)`` is its forward pass."""

    def __init__(self, use: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Any:
        return self.use(x, self.weight)


class Around(nn.Module):
    """A layer between two others; ``use(layer, x)`` calls it."""

    def __init__(self, layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.use = nn.Linear(8, WIDTH), layer, nn.Linear(WIDTH, 4), use

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self.layer, self.first(x)))


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, WeightGradientDeferral]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    deferral = WeightGradientDeferral(models[1], k=99)
    return models[0], models[1], deferral


def step(model: nn.Module, deferral: WeightGradientDeferral | None = None) -> list[Tensor | None]:
    model.zero_grad()
    loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().mean()
    if deferral is not None:
        deferral.watch(loss)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def note_gradients(model: nn.Module) -> tuple[list[str], list[Any]]:
    """The names of parameters whose gradient is there, in the order in which hooks on them fire."""
    fired: list[str] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
        for name, parameter in model.named_parameters()
    ]
    return fired, handles


def assert_same(model: nn.Module, plain: nn.Module, deferral: WeightGradientDeferral, steps: int = 1) -> None:
    for _ in range(steps):
        for mine, theirs in zip(step(model, deferral), step(plain), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or torch.equal(mine, theirs)
