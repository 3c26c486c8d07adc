"""What the fusion tests share: a small network, a plain loop, and a bitwise comparison of two runs."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from retime.mechanisms.fusion import fuse_optimizer

MakeOptimizer = Callable[[Any], Optimizer]
Step = Callable[[nn.Module, Optimizer, Tensor, int], Any]
"""Of a loop: all that it does with a batch, of which the last argument is the number."""
WIDTH = 16


def network(depth: int = 4, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)])


def batches(count: int, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, width, generator=generator) for _ in range(count)]


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def fused(mode: str = "backward", model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Optimizer, Any]:
    """A model whose optimizer is fused, with both; nobody has run a step."""
    model = network() if model is None else model
    optimizer = adamw(model.parameters())
    return model, optimizer, fuse_optimizer(model, optimizer, mode, **options)


class Run:
    """A model and its optimizer after a loop, with what fusion reported."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, fusion: Any) -> None:
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.state = copy.deepcopy(optimizer.state_dict())
        self.report = fusion.report() if fusion is not None else None
        self.fusion = fusion


def train(
    mode: str | None,
    make_optimizer: MakeOptimizer = adamw,
    *,
    model: nn.Module | None = None,
    steps: int = 6,
    loss: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
    step: Step | None = None,
    each_step: Callable[[nn.Module, Optimizer, int], None] = lambda model, optimizer, i: None,
    set_to_none: bool = True,
    **options: Any,
) -> Run:
    """The plain loop, or one of the test's own steps; ``mode`` None leaves the optimizer alone."""
    model = network() if model is None else model
    optimizer = make_optimizer(model.parameters())
    fusion = fuse_optimizer(model, optimizer, mode, **options) if mode else None
    for i, x in enumerate(batches(steps)):
        if step is not None:
            step(model, optimizer, x, i)
        else:
            loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        each_step(model, optimizer, i)
    run = Run(model, optimizer, fusion)
    if fusion is not None:
        fusion.remove()
    return run


def assert_same(plain: Run, ours: Run) -> None:
    """Weights and optimizer state agree to the last bit."""
    assert plain.weights.keys() == ours.weights.keys()
    for name, value in plain.weights.items():
        assert torch.equal(value, ours.weights[name]), name
    assert plain.state["param_groups"] == ours.state["param_groups"]
    assert plain.state["state"].keys() == ours.state["state"].keys()
    for index, state in plain.state["state"].items():
        assert state.keys() == ours.state["state"][index].keys()
        for key, value in state.items():
            theirs = ours.state["state"][index][key]
            assert torch.equal(value, theirs) if isinstance(value, Tensor) else value == theirs, (index, key)


def both(mode: str, *args: Any, make: Callable[[], nn.Module] = network, **options: Any) -> Any:
    """Train plainly and then fused, compare every bit, and return what fusion reports."""
    plain, ours = (train(one, *args, model=make(), **options) for one in (None, mode))
    assert_same(plain, ours)
    return ours.report
