"""A look at one step on one rank, before the model is cut: what goes between its layers, and what they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from retime.mechanisms.pipeline.errors import PipelineError
from retime.mechanisms.pipeline.gates import LayerGates
from retime.mechanisms.pipeline.suspended_call import draw_for
from retime.mechanisms.pipeline.values import ValueKind, kind_of, shapes_of, tensors_in_order

__all__ = ["FIRST_SEED", "Survey", "survey"]

FIRST_SEED = 0
"""Of the first batch, whole or in stages."""
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Survey:
    """What each layer was given and gave, by number.

    Attributes:
        given: the values of the tensors in its arguments.
        outputs: kinds of what it returned, by the shapes of what it was given.
        forward_ms: how long it ran, the same for layers that are alike; the first one's with all before it, the last
            one's with all behind it.
        saved_bytes: what it saved for its backward pass.
        output: what the step returned.
    """

    def __init__(self, layers: int) -> None:
        self.given: list[list[Tensor]] = [[] for _ in range(layers)]
        self.outputs: dict[tuple[int, Shapes], ValueKind] = {}
        self.forward_ms = [0.0] * layers
        self.saved_bytes = [0] * layers
        self.output: Any = None


class _Looks:
    """A visitor that notes, and lets all layers run."""

    def __init__(self, found: Survey, names: Callable[[int], str]) -> None:
        self._found, self._name = found, names
        self._since = _now()
        self._before_ms = self._after_ms = 0.0
        self.next = 0
        self._shapes: Shapes = ()
        self._seen: set[int] = set()

    def before(self, layer: int, args: Any, kwargs: Any) -> None:
        if layer != self.next:
            what = "a second time" if layer < self.next else f"before {self._name(self.next)}"
            raise PipelineError(
                f"training_step calls {self._name(layer)} {what}: a pipeline needs each layer once, in the order of "
                "the list; name another list with layers="
            )
        self.next += 1
        self._found.given[layer] = [tensor.detach().clone() for tensor in tensors_in_order((args, kwargs))]
        self._shapes = shapes_of((args, kwargs))
        took = self._lap()
        if layer:
            self._found.forward_ms[layer - 1] += took
        else:
            self._before_ms = took

    def is_here(self, layer: int) -> bool:
        draw_for(layer, FIRST_SEED)
        return True

    def instead(self, layer: int, args: Any, kwargs: Any) -> Any:
        raise AssertionError

    def after(self, layer: int, output: Any) -> Any:
        self._found.outputs[layer, self._shapes] = kind_of(output)
        if layer + 1 == len(self._found.given):
            self._found.forward_ms[layer] += self._lap()
        return output

    def saved(self, tensor: Tensor) -> Tensor:
        """A tensor is saved for a backward pass: the one of the layer that runs."""
        if tensor.layout == torch.strided and not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self._found.saved_bytes[max(0, self.next - 1)] += storage.nbytes()
        return tensor

    def end(self, layers: Sequence[nn.Module]) -> None:
        """The step has run: layers that are alike take the same, and what is around them counts with the outermost."""
        after, found = self._lap(), self._found
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, layer in enumerate(layers):
            shapes = tuple((tuple(t.shape), t.dtype) for t in found.given[number])
            kind = type(layer), tuple(tuple(p.shape) for p in layer.parameters()), shapes
            alike.setdefault(kind, []).append(number)
        for numbers in alike.values():
            typical = median(found.forward_ms[number] for number in numbers)
            for number in numbers:
                found.forward_ms[number] = typical
        found.forward_ms[0] += self._before_ms
        found.forward_ms[-1] += after

    def _lap(self) -> float:
        now = _now()
        took, self._since = now - self._since, now
        return 1000 * took


def survey(call: Callable[[], Any], gates: LayerGates, layers: Sequence[nn.Module], names: Sequence[str]) -> Survey:
    """Run a step whole on this rank, twice: libraries are warm in the second, which is timed.

    Args:
        call: the step, of one micro-batch.
        gates: of all layers.
        layers: in order.
        names: of the layers, for errors.

    Raises:
        PipelineError: it does not call each layer once and in order.
    """
    for _ in range(2):
        found = Survey(len(names))
        looks = _Looks(found, lambda layer: repr(names[layer]))
        gates.visitor = looks
        try:
            with saved_tensors_hooks(looks.saved, lambda tensor: tensor):
                found.output = call()
        finally:
            gates.visitor = None
        if looks.next < len(names):
            raise PipelineError(
                f"training_step does not call {names[looks.next]!r}: a pipeline needs each layer of the list once and "
                "in order, through module(...) and not through .forward; name another list with layers="
            )
        looks.end(layers)
    return found


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
