"""A look at one step on one rank, before the model is cut: what goes between its layers, and what they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from retime.foundations.parts import loss_of
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.pipeline.calls import (
    LayerInterceptors,
    TensorSpec,
    Visitor,
    draw_for,
    kind_of,
    shapes_of,
    tensors_in_order,
)
from retime.mechanisms.pipeline.checks import PipelineError, refuse_kinds
from retime.mechanisms.pipeline.ownership import Reached

# Layers that are alike: what is measured of one holds for all of them.


def alike(layers: Sequence[nn.Module], given: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """The numbers of the layers, those of one class, with parameters and inputs of the same shapes, together."""
    numbers_of: dict[tuple[Any, ...], list[int]] = {}
    for number, (layer, tensors) in enumerate(zip(layers, given, strict=True)):
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        kind = type(layer), tuple(tuple(p.shape) for p in layer.parameters()), shapes
        numbers_of.setdefault(kind, []).append(number)
    return list(numbers_of.values())


def typical(values: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    """Each layer's value, as the median of those of its group."""
    medians = list(values)
    for numbers in groups:
        middle = median(values[number] for number in numbers)
        for number in numbers:
            medians[number] = middle
    return medians


# How long the output gradient and the weight gradient of each layer take, in a step that runs whole on this rank.

_PASSES = 2
"""Timed passes of each kind; the faster counts."""


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


FIRST_SEED = 0
"""Seed of the first batch, whole or in stages."""
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Survey:
    """What each layer was given and gave, by number.

    Attributes:
        given: the values of the tensors in its arguments.
        outputs: kinds of what it returned, by the shapes of what it was given.
        forward_ms: how long it ran, the same for layers that are alike; the first one's with all before it, the last
            one's with all behind it.
        output_gradient_ms, weight_gradient_ms: likewise; empty where that cannot be told.
        saved_bytes: what it saved for its backward pass.
        writes: layers that write into what they are given.
        output: what the step returned.
        front, behind: parameters that are used in front of the layers, and behind them.
        skips: pairs of layers, or one and what lies behind them: what the first gives goes past those between.
    """

    def __init__(self, layers: int) -> None:
        self.given: list[list[Tensor]] = [[] for _ in range(layers)]
        self.outputs: dict[tuple[int, Shapes], TensorSpec] = {}
        self.forward_ms = [0.0] * layers
        self.output_gradient_ms: list[float] = []
        self.weight_gradient_ms: list[float] = []
        self.saved_bytes = [0] * layers
        self.writes: set[int] = set()
        self.output: Any = None
        self.front: set[Tensor] = set()
        self.behind: set[Tensor] = set()
        self.skips: list[tuple[int, int]] = []


class _Looks(Visitor):
    """Notes what layers are given and give."""

    def __init__(self, surveyed: Survey, names: Callable[[int], str]) -> None:
        self._found, self._name = surveyed, names
        self._since = now()
        self.backward = BackwardTimes(len(surveyed.given))
        self._before_ms = 0.0
        self.next = 0
        self._shapes: Shapes = ()
        self._given: list[tuple[Tensor, int]] = []  # to the layer that runs, with its version
        self._seen: set[int] = set()
        self._last: list[Tensor] = []
        self._near: list[Tensor] = []  # to the layer before
        self._gave: dict[Any, int] = {}  # by node of the graph, the layer that gave the tensor
        self._returned: list[tuple[tuple[int, Shapes], int, Tensor, int]] = []  # key in `outputs`, number, version
        self._written: dict[tuple[int, Shapes], set[int]] = {}  # numbers of tensors, by key in `outputs`

    def before(self, layer: int, args: Any, kwargs: Any) -> None:
        if layer != self.next:
            what = "a second time" if layer < self.next else f"before {self._name(self.next)}"
            raise PipelineError(
                f"training_step calls {self._name(layer)} {what}: a pipeline needs each layer once, in the order of "
                "the list; name another list with layers="
            )
        self.next += 1
        self._note_written()
        refuse_kinds(self._name(layer), (args, kwargs))
        given = tensors_in_order((args, kwargs))
        self._found.given[layer] = [tensor.detach().clone() for tensor in given]
        # of inference tensors there is no version
        self._given = [(tensor, version_of(tensor)) for tensor in given if not tensor.is_inference()]
        self._shapes = shapes_of((args, kwargs))
        self.backward.enter(layer, given)
        self._note_skips(layer, given)
        took = self._lap()
        if layer:
            self._found.forward_ms[layer - 1] += took
        else:
            self._before_ms = took
            self._found.front = Reached(given).leaves

    def is_here(self, layer: int) -> bool:
        draw_for(layer, FIRST_SEED)
        return True

    def after(self, layer: int, output: Any) -> Any:
        refuse_kinds(self._name(layer), output)
        self._found.outputs[layer, self._shapes] = kind_of(output)
        self._last = tensors_in_order(output)
        if any(version_of(tensor) != version for tensor, version in self._given):
            self._found.writes.add(layer)
        self._given.clear()
        # what this layer has written into is not written into between the layers
        self._returned = [(key, number, tensor, version_of(tensor)) for key, number, tensor, _ in self._returned]
        if torch.is_grad_enabled():  # the graph keeps them anyway
            self._returned += [
                ((layer, self._shapes), number, tensor.detach(), version_of(tensor))
                for number, tensor in enumerate(self._last)
                if not tensor.is_inference()
            ]
        if layer + 1 == len(self._found.given):
            self.backward.enter(layer + 1, self._last)
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

    def end(self, model: nn.Module, layers: Sequence[nn.Module], *, gradients: bool) -> None:
        """The step has run: layers that are alike take the same, and what is around them counts with the outermost."""
        after, surveyed = self._lap(), self._found
        self._note_written()
        for key, numbers in self._written.items():
            surveyed.outputs[key] = surveyed.outputs[key].with_written(numbers)
        self._returned.clear()
        surveyed.behind = Reached(
            tensors_in_order(surveyed.output), until={tensor.grad_fn for tensor in self._last}
        ).leaves
        self._note_skips(len(layers), tensors_in_order(surveyed.output))
        self._last, self._near = [], []
        self._gave.clear()
        groups = alike(layers, surveyed.given)
        surveyed.forward_ms = typical(surveyed.forward_ms, groups)
        surveyed.forward_ms[0] += self._before_ms
        surveyed.forward_ms[-1] += after
        times = self.backward.measure(surveyed.output, model, layers, groups) if gradients else None
        if times is not None:
            surveyed.output_gradient_ms, surveyed.weight_gradient_ms = times

    def _note_written(self) -> None:
        """Between two layers: what earlier ones returned may have been written into, as by ``x.relu_()``."""
        for key, number, tensor, version in self._returned:
            if version_of(tensor) != version:
                self._written.setdefault(key, set()).add(number)

    def _note_skips(self, layer: int, given: list[Tensor]) -> None:
        """What a layer is given may come from the one before, or from what that was given."""
        gave = {tensor.grad_fn: layer - 1 for tensor in self._last if tensor.grad_fn is not None}
        near = gave.keys() | {tensor.grad_fn for tensor in self._near}
        past = Reached(given, until=near | self._gave.keys()).ends - near
        self._found.skips += sorted({(self._gave[node], layer) for node in past})
        self._gave |= gave
        self._near = given

    def _lap(self) -> float:
        at = now()
        took, self._since = at - self._since, at
        return 1000 * took


def survey(
    call: Callable[[], Any],
    model: nn.Module,
    gates: LayerInterceptors,
    layers: Sequence[nn.Module],
    names: Sequence[str],
    apart: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Survey:
    """Run a step whole on this rank, three times: forward passes are timed in the second, which needs no new memory.

    Args:
        call: the step, of one micro-batch.
        model: whole.
        gates: of all layers.
        layers: in order.
        names: of the layers, for errors.
        apart: inside, a run leaves no trace, so that the last one begins as the first did (spectral norms).

    Raises:
        PipelineError: it does not call each layer once and in order.
    """

    def once(*, gradients: bool) -> Survey:
        surveyed = Survey(len(names))
        looks = _Looks(surveyed, lambda layer: repr(names[layer]))
        hooks = saved_tensors_hooks(looks.saved, lambda tensor: tensor)
        try:
            with gates.visited_by(looks), torch.set_grad_enabled(gradients), hooks:
                surveyed.output = call()
            if looks.next < len(names):
                raise PipelineError(
                    f"training_step does not call {names[looks.next]!r}: a pipeline needs each layer of the list once "
                    "and in order, through module(...) and not through .forward; name another list with layers="
                )
            looks.end(model, layers, gradients=gradients)
        finally:
            looks.backward.remove()
        return surveyed

    with apart():
        once(gradients=False)
    with apart():
        forward_ms = once(gradients=False).forward_ms
    surveyed = once(gradients=True)
    surveyed.forward_ms = forward_ms
    return surveyed
