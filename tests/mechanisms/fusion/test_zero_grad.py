"""``zero_grad(set_to_none=False)`` and backward fusion: zeros are gradients, which move what nothing used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from support.fusion import MakeOptimizer, both


class Branches(nn.Module):
    """The second branch is used in every third step only, the third never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.first(x).relu()
        return self.second(y) if self.calls % 3 == 1 else y


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "single": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """A step of two backward passes."""
    model(x[:2]).square().mean().backward()
    return model(x[2:]).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_zeros_update_parameters_without_a_gradient(name: str, passes: int, mode: str) -> None:
    loss: Callable[[nn.Module, Tensor], Tensor] = (lambda m, x: m(x).square().mean()) if passes == 1 else twice
    report = both(mode, OPTIMIZERS[name], make=Branches, loss=loss, set_to_none=False)
    assert report.fused_updates > 0 or mode == "forward"


def test_zeros_of_a_sparse_gradient_are_sparse() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.abs().long().flatten()).square().mean()  # type: ignore[no-any-return]

    def embedding() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(16, 4, sparse=True)

    def sparse_adam(parameters: Any) -> Optimizer:
        return torch.optim.SparseAdam(list(parameters), lr=0.1)

    assert both("backward", sparse_adam, make=embedding, loss=loss, set_to_none=False).fused_updates > 0
