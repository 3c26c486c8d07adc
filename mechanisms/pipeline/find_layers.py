"""Where a model can be cut: the list of layers that it runs one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from retime.foundations.lazy_updates import is_compiled, nbytes
from retime.foundations.no_effect import warn_no_effect
from retime.mechanisms.pipeline.errors import PipelineError

__all__ = ["AUTO", "LEAST_SHARE", "LayerList", "find_layers", "first_layers", "warn_of_no_list"]

AUTO = "auto"
"""In place of a path: a list, or else the modules that a step calls."""
LEAST_SHARE = 0.5
"""Of the model's parameters, that the layers have to hold."""
_SHOWN = 12
"""Layers in an error."""


@dataclass(frozen=True)
class LayerList:
    """The layers that a pipeline is cut between.

    Attributes:
        path: of the module that holds them, or what they are.
        modules: in forward order.
        names: of them.
    """

    path: str
    modules: list[nn.Module]
    names: list[str]


def find_layers(model: nn.Module, path: str | None, ranks: int) -> LayerList | None:
    """The layers of a model: those at ``path``, or the longest ``Sequential`` or ``ModuleList`` that holds most of it.

    Args:
        model: to be cut.
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
    total = sum(map(nbytes, model.parameters()))
    found = _best(model, total, ranks) if path is None or path == AUTO else _at(model, path)
    if found is not None and len(found.modules) < ranks:
        raise PipelineError(
            f"{found.path!r} has {len(found.modules)} layers for {ranks} ranks: use fewer ranks, or give layers= the "
            "path of a longer list"
        )
    return found


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
        known = ", ".join(repr(name) for name, _ in _lists(model)) or "none"
        raise PipelineError(f"layers={path!r} is no module of the model; lists of layers in it: {known}") from error
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        raise PipelineError(
            f"layers={path!r} is a {type(module).__name__}: give the path of a Sequential or ModuleList, whose entries "
            "run one after another"
        )
    return _listed(path, list(module))


def _best(model: nn.Module, total: int, ranks: int) -> LayerList | None:
    best: LayerList | None = None
    for name, modules in _lists(model):
        held = sum(nbytes(p) for p in {p for module in modules for p in module.parameters()})
        enough = held >= LEAST_SHARE * total and len(modules) >= ranks
        if enough and (best is None or len(modules) > len(best.modules)):
            best = _listed(name, modules)
    return best


def warn_of_no_list(model: nn.Module, called: LayerList, ranks: int) -> None:
    """Say that the model is cut between the modules that its step calls, which nobody asked for."""
    lists = ", ".join(f"{name!r} ({len(modules)})" for name, modules in _lists(model)) or "none"
    warn_no_effect(
        f"no Sequential or ModuleList of {ranks} layers or more holds half of the model's parameters, so it is cut "
        f"between the modules that the step calls, {called.names[0]!r} to {called.names[-1]!r}: give layers='auto' if "
        f"that is right, or name a list with layers='path.to.it' (there are: {lists})"
    )


def _listed(path: str, modules: list[nn.Module]) -> LayerList:
    return LayerList(path, modules, [f"{path}.{number}".lstrip(".") for number in range(len(modules))])


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList) and len(module):
            yield name, list(module)
