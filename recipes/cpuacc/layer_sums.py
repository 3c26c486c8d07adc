"""A network's gradients by layer: each layer's lie side by side and are summed over the ranks as soon as all are there.

Sekiyama et al. 2017, Algorithms 5 to 7, without buckets: one sum a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from retime.mechanisms.ddp.reducers import Reducer
from retime.recipes.core.build import loss_of

__all__ = ["Layer", "LayerSums"]


@dataclass
class Layer:
    """A module's own parameters, whose gradients are views of ``gradients``, shape ``(n,)``."""

    name: str
    parameters: list[nn.Parameter]
    gradients: Tensor
    arrived: int = 0
    complete_at: float = 0.0
    sums: list[torch.futures.Future[Tensor]] = field(default_factory=list)


class LayerSums:
    """Backward passes of a network, with sums beside them or without.

    Args:
        model: all of its parameters get a gradient once in each backward pass.
        batch: inputs ``(B, ...)`` and targets ``(B,)``.
    """

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        self._model, self._batch = model, batch
        self.layers = [_layer(name, module) for name, module in model.named_modules() if _own(module)]
        self._complete: Callable[[Layer], None] = lambda layer: None
        for layer in self.layers:
            for parameter in layer.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, layer))  # type: ignore[no-untyped-call]

    def backward_ms(self) -> list[float]:
        """Milliseconds of a backward pass until each layer's gradients are there, from those of the layer behind it."""
        began = self._run(lambda layer: None)
        stamps = [layer.complete_at for layer in self.layers]
        behind = [*stamps[1:], began]
        return [(mine - before) * 1e3 for mine, before in zip(stamps, behind, strict=True)]

    def overlapped_ms(self, reducer: Reducer) -> tuple[float, float]:
        """Milliseconds of a backward pass with a sum a layer beside it, and of the wait behind it."""
        numbers = {id(layer): number for number, layer in enumerate(self.layers)}

        def start(layer: Layer) -> None:
            layer.sums.append(reducer.start(numbers[id(layer)], layer.gradients))

        began = self._run(start)
        ended = time.perf_counter()
        for layer in self.layers:
            layer.sums.pop().wait()
        return (ended - began) * 1e3, (time.perf_counter() - ended) * 1e3

    def _run(self, complete: Callable[[Layer], None]) -> float:
        for layer in self.layers:
            layer.gradients.zero_()
            layer.arrived = 0
        loss = loss_of(self._model(self._batch[0]), self._batch[1])
        self._complete = complete
        began = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        return began

    def _arrived(self, layer: Layer, parameter: Tensor) -> None:
        layer.arrived += 1
        if layer.arrived == len(layer.parameters):
            layer.complete_at = time.perf_counter()
            self._complete(layer)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _layer(name: str, module: nn.Module) -> Layer:
    parameters = _own(module)
    gradients = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = torch.split(gradients, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return Layer(name, parameters, gradients)
