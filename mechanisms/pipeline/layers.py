"""Where a model can be cut: the list of layers that it runs one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retime.foundations.lazy_updates import is_compiled, nbytes
from retime.foundations.messages import warn_no_effect
from retime.foundations.parts import loss_of
from retime.mechanisms.pipeline.calls import tensors_in_order
from retime.mechanisms.pipeline.checks import PipelineError
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
    used = Reached(_losses(output)).leaves
    unused = {p for p in model.parameters() if p.requires_grad and p not in used} if used else set()
    del output
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


def _losses(output: Any) -> list[Tensor]:
    try:
        return [loss_of(output)]
    except ValueError:  # which the first batch tells of
        return tensors_in_order(output)


def _calls_of(model: nn.Module, run: Callable[[], Any]) -> tuple[list[_Call], Any]:
    """What the step calls, and what that calls in turn; and what it returns."""
    names = {module: name for name, module in model.named_modules()}
    calls: list[_Call] = []
    open_calls = [calls]

    def enter(module: nn.Module, _: Any) -> None:
        call = _Call(names[module], module)
        open_calls[-1].append(call)
        open_calls.append(call.inner)

    def leave(*_: Any) -> None:
        open_calls.pop()

    handles = [module.register_forward_pre_hook(enter, prepend=True) for module in names]
    handles += [module.register_forward_hook(leave, always_call=True) for module in names]
    try:
        output = run()
    finally:
        for handle in handles:
            handle.remove()
    return calls, output


def _all(calls: list[_Call]) -> Iterator[_Call]:
    for call in calls:
        yield call
        yield from _all(call.inner)
