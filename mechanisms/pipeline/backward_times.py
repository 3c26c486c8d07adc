"""How long the output gradient and the weight gradient of each layer take, in a step that runs whole on this rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.parts import loss_of
from retime.mechanisms.pipeline.alike import typical

__all__ = ["BackwardTimes", "now"]

_PASSES = 2
"""Of each kind; the faster counts."""


class BackwardTimes:
    """Clocks when gradients arrive at what went into the layers.

    A pass for these gradients alone computes no weight gradient, and gives O; one for the parameters too gives O and W
    together. Neither sets a ``.grad``.

    Args:
        layers: how many.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._entered: list[Tensor] = []
        self._handles: list[Any] = []
        self._arrived: dict[int, float] = {}

    def enter(self, layer: int, tensors: Sequence[Tensor]) -> None:
        """What goes into a layer; with the number of layers: what comes out of the last."""
        for tensor in tensors:
            if tensor.requires_grad:
                self._entered.append(tensor)
                self._handles.append(tensor.register_hook(lambda _, layer=layer: self._note(layer)))  # type: ignore[no-untyped-call]

    def measure(
        self, output: Any, model: nn.Module, layers: Sequence[nn.Module], groups: Sequence[Sequence[int]]
    ) -> tuple[list[float], list[float]] | None:
        """Run the passes; of layers that are alike, one has its weight gradient computed.

        Args:
            output: of the step: a loss, or what has one; its graph stays.
            model: whole.
            layers: of it.
            groups: of layers that are alike.

        Returns:
            Milliseconds of O and W by layer, with what lies in front of the layers and behind them in the outermost;
            None where the graph does not allow such passes.
        """
        chosen = [numbers[len(numbers) // 2] for numbers in groups]
        left_out = {p for number, layer in enumerate(layers) if number not in chosen for p in layer.parameters()}
        wanted = [p for p in model.parameters() if p.requires_grad and p not in left_out]
        try:
            loss = loss_of(output)
            outputs = min((self._pass(loss, self._entered) for _ in range(_PASSES)), key=sum)
            both = min((self._pass(loss, [*self._entered, *wanted]) for _ in range(_PASSES)), key=sum)
        except Exception:  # such as reentrant checkpointing, which only allows .backward(): the step itself will show
            return None
        weight = [max(0.0, more - less) for more, less in zip(both, outputs, strict=True)]
        inner = slice(1, 1 + self._layers)
        for number, group in zip(chosen, groups, strict=True):
            for other in group:
                weight[1 + other] = weight[1 + number]
        outputs[inner] = typical(outputs[inner], groups)
        return _with_ends(outputs[inner], outputs[0], outputs[-1]), _with_ends(weight[inner], weight[0], weight[-1])

    def remove(self) -> None:
        """Leave the tensors alone."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._entered = [], []

    def _pass(self, loss: Tensor, targets: Sequence[Tensor]) -> list[float]:
        """Milliseconds of what lies in front of the layers, of each layer, and of what lies behind them."""
        self._arrived = {}
        before = now()
        torch.autograd.grad(loss, targets, retain_graph=True, allow_unused=True)
        end, took = now(), []
        for layer in reversed(range(self._layers + 1)):
            at = max(before, self._arrived.get(layer, end))
            took.append(1000 * (at - before))
            before = at
        return [1000 * (end - before), *reversed(took)]

    def _note(self, layer: int) -> None:
        self._arrived[layer] = now()


def _with_ends(values: list[float], front: float, behind: float) -> list[float]:
    return [value + (front if not n else 0) + (behind if n == len(values) - 1 else 0) for n, value in enumerate(values)]


def now() -> float:
    """Seconds, when the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
