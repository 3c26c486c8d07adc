"""The layers of a model: where it can be cut, what goes between them and what they take.

The model is looked at on one rank, before it is cut.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from retime.foundations.lazy_updates import is_compiled, nbytes
from retime.foundations.messages import warn_no_effect
from retime.foundations.parts import loss_of
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.pipeline.calls import (
    LayerHandler,
    LayerInterceptors,
    ValueSpec,
    draw_for,
    shapes_of,
    spec_of,
    tensors_in_order,
)
from retime.mechanisms.pipeline.checks import PipelineError, refuse_kinds, refuse_reentrant
from retime.mechanisms.pipeline.losses import evaluated
from retime.mechanisms.pipeline.ownership import Reached

AUTO = "auto"
"""In place of a path: a list, or else the modules that a step calls."""
LEAST_SHARE = 0.5
"""Share of the model's parameters that the layers have to hold."""
_SHOWN = 12
"""Layers in an error."""


@dataclass(frozen=True)
class LayerList:
    """The layers that a pipeline is cut between.

    Attributes:
        path: of the module that holds them, or what they are.
        modules: in forward order.
    """

    path: str
    modules: list[nn.Module]
    names: list[str]


def find_layers(model: nn.Module, path: str | None, ranks: int) -> LayerList | None:
    """The layers of a model: those at ``path``, or the longest ``Sequential`` or ``ModuleList`` that holds most of it.

    Args:
        path: of a ``Sequential`` or ``ModuleList``, as ``model.get_submodule`` takes it; None or ``"auto"``: to be
            found, if there is one.
        ranks: each of which gets one layer or more.

    Returns:
        Them; None: no list holds most of the model.

    Raises:
        PipelineError: there is no list at the path, it is too short, or the model is compiled.
    """
    if any(is_compiled(module) for module in model.modules()):
        raise PipelineError("a compiled model cannot be cut between its layers: leave out torch.compile")
    chosen = _best(model, ranks) if path is None or path == AUTO else _at(model, path)
    if chosen is not None and len(chosen.modules) < ranks:
        raise PipelineError(
            f"{chosen.path!r} has {len(chosen.modules)} layers for {ranks} ranks: use fewer ranks, or give layers= the "
            "path of a longer list"
        )
    return chosen


def first_layers(
    split: Literal["even", "fastest"] | Sequence[str], layers: LayerList, ranks: int, group: int | Literal["auto"]
) -> Literal["even", "fastest"] | tuple[int, ...]:
    """The numbers of the layers that ``split`` names, or its own word.

    Raises:
        PipelineError: the names are not those of layers, in order, from the first one on.
    """
    if split == "even" or split == "fastest":
        return split
    names, given = layers.names, [split] if isinstance(split, str) else list(split)
    problem = None
    if unknown := [one for one in given if one not in names]:
        problem = f"{unknown[0]!r} is no layer"
    elif given != [name for name in names if name in given] or len(set(given)) < len(given):
        problem = "names are to be in the order of the layers, each once"
    elif given[:1] != names[:1]:
        problem = f"the first stage begins with {names[0]!r}"
    elif len(given) < ranks:
        problem = f"there are {ranks} ranks, and each has a stage"
    elif group != "auto":
        problem = f"the stages are named already, so leave out group={group}"
    if problem is not None:
        shown = names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], "...", names[-1]]
        raise PipelineError(
            f"split={split!r}: {problem}. Give 'even', 'fastest', or the name of each stage's first layer, out of "
            f"{', '.join(shown)}"
        )
    return tuple(map(names.index, given))


def _at(model: nn.Module, path: str) -> LayerList:
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        listed = ", ".join(repr(name) for name, _ in _lists(model)) or "none"
        raise PipelineError(f"layers={path!r} is no module of the model; lists of layers in it: {listed}") from error
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        raise PipelineError(
            f"layers={path!r} is a {type(module).__name__}: give the path of a Sequential or ModuleList, whose entries "
            "run one after another"
        )
    return _listed(path, list(module))


def _best(model: nn.Module, ranks: int) -> LayerList | None:
    total = sum(map(nbytes, model.parameters()))
    best: LayerList | None = None
    for name, modules in _lists(model):
        size_bytes = sum(nbytes(p) for p in {p for module in modules for p in module.parameters()})
        enough = size_bytes >= LEAST_SHARE * total and len(modules) >= ranks
        if enough and (best is None or len(modules) > len(best.modules)):
            best = _listed(name, modules)
    return best


def warn_of_no_list(model: nn.Module, called: LayerList, ranks: int) -> None:
    """Say that the model is cut between the modules that its step calls, which nobody asked for."""
    lists = ", ".join(f"{name!r} ({len(modules)})" for name, modules in _lists(model)) or "none"
    warn_no_effect(
        f"no Sequential or ModuleList of {ranks} layers or more holds half of the parameters, so the model is cut "
        f"between the modules that the step calls, {called.names[0]!r} to {called.names[-1]!r}: give layers='auto' if "
        f"that is right, or name a list with layers='path.to.it' (there are: {lists})"
    )


def _listed(path: str, modules: list[nn.Module]) -> LayerList:
    return LayerList(path, modules, [f"{path}.{number}".lstrip(".") for number in range(len(modules))])


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList) and len(module):
            yield name, list(module)


# Where a model without a list of layers can be cut: the modules that a step calls, one after another.


@dataclass(eq=False)
class _Call:
    name: str
    module: nn.Module
    inner: list[_Call] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes, self.module.parameters()))


def call_chain(model: nn.Module, run: Callable[[], Any], ranks: int) -> LayerList:
    """The modules with parameters that a step calls once each, in the order of their calls.

    A module that holds more than a rank's equal share is taken apart into those that it calls itself; one that is
    called twice, or that the loss does not use (a second head), is no layer, and counts as what runs between them.

    Args:
        run: the step; it runs twice, in training and in evaluation mode, which have to call the same modules.
        ranks: each of which gets one layer or more.

    Raises:
        PipelineError: there are fewer such modules than ranks, or they hold less than half of the model.
    """
    calls, output = _calls_of(model, run)
    try:
        losses = [loss_of(output)]
    except ValueError:  # which the first batch tells of
        losses = tensors_in_order(output)
    used = Reached(losses).leaves
    unused = {p for p in model.parameters() if p.requires_grad and p not in used} if used else set()
    del output, losses
    with evaluated(model):
        again = list(_all(_calls_of(model, run)[0]))
    times = Counter(call.name for call in _all(calls))
    inside = {call.name: [one.name for one in call.inner] for call in again}
    order = [call.name for call in again]

    def opens(call: _Call) -> bool:
        here = [one.name for one in call.inner]
        return times[call.name] == 1 and inside.get(call.name) == here and any(one.nbytes for one in call.inner)

    def is_layer(call: _Call) -> bool:
        once = times[call.name] == order.count(call.name) == 1
        some_used = not unused.issuperset(call.module.parameters())
        return once and some_used and call.nbytes > 0 and not isinstance(call.module, torch.jit.ScriptModule)

    total = sum(nbytes(p) for p in model.parameters() if p not in unused)
    chain = calls
    while largest := max(filter(opens, chain), key=lambda call: call.nbytes, default=None):
        if sum(map(is_layer, chain)) >= ranks and largest.nbytes * ranks <= total:
            break
        place = chain.index(largest)
        chain = [*chain[:place], *largest.inner, *chain[place + 1 :]]
    layers = [call for call in chain if is_layer(call)]
    names = [call.name for call in layers]
    size_bytes = sum(nbytes(p) for p in {p for call in layers for p in call.module.parameters()})
    if len(layers) < ranks or size_bytes < LEAST_SHARE * total or [name for name in order if name in names] != names:
        listed = ", ".join(map(repr, names)) or "none"
        raise PipelineError(
            f"the model has no Sequential or ModuleList of {ranks} layers or more with half of its parameters, and the "
            f"step does not call {ranks} modules or more with half of them, each once and in the same order in "
            f"training and evaluation (it does: {listed}): put the layers into an nn.Sequential, or name the list with "
            "layers='path.to.it'"
        )
    return LayerList("modules in the order of their calls", [call.module for call in layers], names)


def _calls_of(model: nn.Module, run: Callable[[], Any]) -> tuple[list[_Call], Any]:
    """Calls that the step makes, and that these make in turn; and what the step returns."""
    names = {module: name for name, module in model.named_modules()}
    calls: list[_Call] = []
    open_calls = [calls]

    def enter(module: nn.Module, _: Any) -> None:
        call = _Call(names[module], module)
        open_calls[-1].append(call)
        open_calls.append(call.inner)

    def leave(*_: Any) -> None:
        open_calls.pop()

    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        output = run()
    return calls, output


def _all(calls: list[_Call]) -> Iterator[_Call]:
    for call in calls:
        yield call
        yield from _all(call.inner)


# Layers that are alike: what is measured of one holds for all of them.


def group_equal_layers(layers: Sequence[nn.Module], given: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return the numbers of layers in groups of one class whose parameters and inputs have the same shapes."""
    numbers_of: dict[tuple[Any, ...], list[int]] = {}
    for number, (layer, tensors) in enumerate(zip(layers, given, strict=True)):
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        kind = type(layer), tuple(tuple(p.shape) for p in layer.parameters()), shapes
        numbers_of.setdefault(kind, []).append(number)
    return list(numbers_of.values())


def group_medians(values: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    """Return for each layer the median of its group's values."""
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
        """Note what goes into a layer; with the number of layers: what comes out of the last."""
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
        outputs[inner] = group_medians(outputs[inner], groups)
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


class LayerProfile:
    """Profile of the layers, by number: what each was given and gave.

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
        self.outputs: dict[tuple[int, Shapes], ValueSpec] = {}
        self.forward_ms = [0.0] * layers
        self.output_gradient_ms: list[float] = []
        self.weight_gradient_ms: list[float] = []
        self.saved_bytes = [0] * layers
        self.writes: set[int] = set()
        self.output: Any = None
        self.front: set[Tensor] = set()
        self.behind: set[Tensor] = set()
        self.skips: list[tuple[int, int]] = []


class _Looks(LayerHandler):
    """Notes what layers are given and give."""

    def __init__(self, profile: LayerProfile, names: Callable[[int], str]) -> None:
        self._profile, self._name = profile, names
        self._since = now()
        self.backward = BackwardTimes(len(profile.given))
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
        refuse_reentrant(self._name(layer))
        given = tensors_in_order((args, kwargs))
        self._profile.given[layer] = [tensor.detach().clone() for tensor in given]
        # of inference tensors there is no version
        self._given = [(tensor, version_of(tensor)) for tensor in given if not tensor.is_inference()]
        self._shapes = shapes_of((args, kwargs))
        self.backward.enter(layer, given)
        self._note_skips(layer, given)
        took = self._lap()
        if layer:
            self._profile.forward_ms[layer - 1] += took
        else:
            self._before_ms = took
            self._profile.front = Reached(given).leaves

    def is_here(self, layer: int) -> bool:
        draw_for(layer, FIRST_SEED)
        return True

    def after(self, layer: int, output: Any) -> Any:
        refuse_kinds(self._name(layer), output)
        self._profile.outputs[layer, self._shapes] = spec_of(output)
        self._last = tensors_in_order(output)
        if any(version_of(tensor) != version for tensor, version in self._given):
            self._profile.writes.add(layer)
        self._given.clear()
        # what this layer has written into is not written into between the layers
        self._returned = [(key, number, tensor, version_of(tensor)) for key, number, tensor, _ in self._returned]
        if torch.is_grad_enabled():  # the graph keeps them anyway
            self._returned += [
                ((layer, self._shapes), number, tensor.detach(), version_of(tensor))
                for number, tensor in enumerate(self._last)
                if not tensor.is_inference()
            ]
        if layer + 1 == len(self._profile.given):
            self.backward.enter(layer + 1, self._last)
            self._profile.forward_ms[layer] += self._lap()
        return output

    def saved(self, tensor: Tensor) -> Tensor:
        """A tensor is saved for a backward pass: the one of the layer that runs."""
        if tensor.layout == torch.strided and not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self._profile.saved_bytes[max(0, self.next - 1)] += storage.nbytes()
        return tensor

    def end(self, model: nn.Module, layers: Sequence[nn.Module], *, gradients: bool) -> None:
        """The step has run: layers that are alike take the same, and what is around them counts with the outermost."""
        after, profile = self._lap(), self._profile
        self._note_written()
        for key, numbers in self._written.items():
            profile.outputs[key] = profile.outputs[key].with_written(numbers)
        self._returned.clear()
        profile.behind = Reached(tensors_in_order(profile.output), until={one.grad_fn for one in self._last}).leaves
        self._note_skips(len(layers), tensors_in_order(profile.output))
        self._last, self._near = [], []
        self._gave.clear()
        groups = group_equal_layers(layers, profile.given)
        profile.forward_ms = group_medians(profile.forward_ms, groups)
        profile.forward_ms[0] += self._before_ms
        profile.forward_ms[-1] += after
        times = self.backward.measure(profile.output, model, layers, groups) if gradients else None
        if times is not None:
            profile.output_gradient_ms, profile.weight_gradient_ms = times

    def _note_written(self) -> None:
        """Between two layers: what earlier ones returned may have been written into, as by ``x.relu_()``."""
        for key, number, tensor, version in self._returned:
            if version_of(tensor) != version:
                self._written.setdefault(key, set()).add(number)

    def _note_skips(self, layer: int, given: list[Tensor]) -> None:
        """Note skips: what a layer is given may come from the one before, or from what that was given."""
        gave = {tensor.grad_fn: layer - 1 for tensor in self._last if tensor.grad_fn is not None}
        near = gave.keys() | {tensor.grad_fn for tensor in self._near}
        past = Reached(given, until=near | self._gave.keys()).ends - near
        self._profile.skips += sorted({(self._gave[node], layer) for node in past})
        self._gave |= gave
        self._near = given

    def _lap(self) -> float:
        at = now()
        took, self._since = at - self._since, at
        return 1000 * took


def profile_layers(
    call: Callable[[], Any],
    model: nn.Module,
    gates: LayerInterceptors,
    layers: Sequence[nn.Module],
    names: Sequence[str],
    apart: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> LayerProfile:
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

    def once(*, gradients: bool) -> LayerProfile:
        profile = LayerProfile(len(names))
        looks = _Looks(profile, lambda layer: repr(names[layer]))
        hooks = saved_tensors_hooks(looks.saved, lambda tensor: tensor)
        try:
            with gates.handled_by(looks), torch.set_grad_enabled(gradients), hooks:
                profile.output = call()
            if looks.next < len(names):
                raise PipelineError(
                    f"training_step does not call {names[looks.next]!r}: a pipeline needs each layer of the list once "
                    "and in order, through module(...) and not through .forward; name another list with layers="
                )
            looks.end(model, layers, gradients=gradients)
        finally:
            looks.backward.remove()
        return profile

    with apart():
        once(gradients=False)
    with apart():
        forward_ms = once(gradients=False).forward_ms
    profile = once(gradients=True)
    profile.forward_ms = forward_ms
    return profile
