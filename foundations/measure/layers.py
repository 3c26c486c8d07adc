"""What each layer of a network costs on this core: F, O and W in milliseconds, and its gradient's bytes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerTimes:
    """What one layer costs: milliseconds of forward (F), output gradient (O), weight gradient (W); gradient bytes."""

    name: str
    forward_ms: float
    output_ms: float
    weight_ms: float
    bytes: int


def layer_times(model: nn.Module, inputs: Tensor, repeats: int = 5) -> list[LayerTimes]:
    """Median times of the leaf layers, in the order in which the forward pass calls them.

    Each layer is timed by itself on the input it gets inside the network. Arithmetic between layers is not seen, a
    layer called twice counts its bytes once, and layers whose inputs are not float tensors have no output gradient.
    """
    calls: list[tuple[str, nn.Module, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments and isinstance(arguments[0], Tensor):
                calls.append((name, module, arguments[0].detach()))

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_pre_hook(note(name)) for name, module in leaves]
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    seen: set[int] = set()
    found = []
    for name, module, given in calls:
        parameters = [p for p in module.parameters() if p.requires_grad]
        fresh = [p for p in parameters if id(p) not in seen]
        seen |= {id(p) for p in fresh}
        found.append(_one(name, module, given, parameters, sum(p.numel() * p.element_size() for p in fresh), repeats))
    return found


def update_ms(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], repeats: int = 5) -> float:
    """Median milliseconds of the whole update, with gradients and states in place."""
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return _median_ms(optimizer.step, repeats)


def _one(
    name: str, module: nn.Module, given: Tensor, parameters: list[nn.Parameter], size: int, repeats: int
) -> LayerTimes:
    differentiable = given.is_floating_point()
    given = given.clone().requires_grad_(differentiable)
    forward = _median_ms(lambda: module(given), repeats)
    outputs = module(given)
    if not isinstance(outputs, Tensor) or not outputs.requires_grad:
        return LayerTimes(name, forward, 0.0, 0.0, size)
    gradient = torch.ones_like(outputs)

    def backward(wanted: list[Any]) -> float:
        if not wanted:
            return 0.0
        return _median_ms(lambda: torch.autograd.grad(outputs, wanted, gradient, retain_graph=True), repeats)

    return LayerTimes(name, forward, backward([given] if differentiable else []), backward(list(parameters)), size)


def _median_ms(work: Callable[[], Any], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return round(statistics.median(times), 4)
