"""Where a model can be cut: the list of layers that it runs one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from retime.mechanisms.lazy_updates import is_compiled, nbytes
from retime.mechanisms.pipeline.errors import PipelineError

__all__ = ["AUTO", "LEAST_SHARE", "LayerList", "find_layers"]

AUTO = "auto"
"""In place of a path: a list, or else the modules that a step calls."""
LEAST_SHARE = 0.5
"""Of the model's parameters, that the layers have to hold."""


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
        path: of a ``Sequential`` or ``ModuleList``, as ``model.get_submodule`` takes it; None: to be found;
            ``"auto"``: to be found, if there is one.
        ranks: each of which gets one layer or more.

    Returns:
        Them; None, for ``"auto"``: no list holds most of the model.

    Raises:
        PipelineError: there is no list at the path, or anywhere, it is too short, or the model is
            compiled.
    """
    if any(is_compiled(module) for module in model.modules()):
        raise PipelineError("a compiled model cannot be cut between its layers: leave out torch.compile")
    total = sum(map(nbytes, model.parameters()))
    found = _best(model, total, ranks, path == AUTO) if path is None or path == AUTO else _at(model, path)
    if found is not None and len(found.modules) < ranks:
        raise PipelineError(
            f"{found.path!r} has {len(found.modules)} layers for {ranks} ranks: use fewer ranks, or give layers= the "
            "path of a longer list"
        )
    return found


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


def _best(model: nn.Module, total: int, ranks: int, may_fail: bool) -> LayerList | None:
    best: LayerList | None = None
    for name, modules in _lists(model):
        held = sum(nbytes(p) for p in {p for module in modules for p in module.parameters()})
        enough = held >= LEAST_SHARE * total and len(modules) >= ranks
        if enough and (best is None or len(modules) > len(best.modules)):
            best = _listed(name, modules)
    if best is None and not may_fail:
        known = ", ".join(f"{name!r} ({len(modules)})" for name, modules in _lists(model)) or "none"
        raise PipelineError(
            f"no Sequential or ModuleList of {ranks} layers or more holds half of the model's parameters, so it is not "
            f"known where to cut it for {ranks} ranks: name the list with layers='path.to.it' (there are: {known}), or "
            "put the layers into an nn.Sequential, or give layers='auto' to cut between the modules that the step calls"
        )
    return best


def _listed(path: str, modules: list[nn.Module]) -> LayerList:
    return LayerList(path, modules, [f"{path}.{number}".lstrip(".") for number in range(len(modules))])


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList) and len(module):
            yield name, list(module)
