"""Names that a step binds anew, beside its model: global variables, variables of enclosing functions, class attributes.

``global calls; calls += 1`` writes into no object that could be copied. So the code that a step may run is searched for
such assignments, and the values that they replace are kept.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["BoundNames"]

_MISSING = object()
_FRAMEWORKS = {*sys.stdlib_module_names, "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
_FRAMEWORKS |= {"numpy", "torchmetrics"}
_GLOBAL, _ENCLOSING = {"STORE_GLOBAL", "DELETE_GLOBAL"}, {"STORE_DEREF", "DELETE_DEREF"}
_REBINDING = {dis.opmap[name] for name in _GLOBAL | _ENCLOSING}
_MOST = 5000
"""So many functions are looked into, the step's own first."""
_PLAIN = (bool, int, float, str, type(None))


class BoundNames:
    """What such names are bound to when this is made.

    Found are functions that ``step`` reaches by its closures and global names, and methods of the model's modules and
    of what the step reaches. What Python, torch and Lightning bind themselves is their own affair.

    Args:
        step: what will run.
        model: what it trains.
    """

    def __init__(self, step: Callable[[Any], Any], model: nn.Module) -> None:
        self._kept: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._seen: dict[int, Any] = {}
        self._waiting: deque[Any] = deque([step, *{type(module): None for module in model.modules()}])
        looked_into = 0
        while self._waiting and looked_into < _MOST:
            looked_into += self._look_into(self._waiting.popleft())
        self._seen.clear()
        self._waiting.clear()

    def put_back(self) -> None:
        """All names are bound as they were."""
        for (_, name), (owner, value) in self._kept.items():
            if _get(owner, name) is not value:
                _set(owner, name, value)

    def numbers(self) -> dict[tuple[int, str], float]:
        """Those that are bound to numbers now."""
        now = {key: _get(owner, key[1]) for key, (owner, _) in self._kept.items()}
        return {key: value for key, value in now.items() if _is_number(value)}

    def bind(self, key: tuple[int, str], value: float) -> None:
        """Until :meth:`put_back`."""
        _set(self._kept[key][0], key[1], value)

    def _keep(self, owner: Any, name: str) -> None:
        self._kept.setdefault((id(owner), name), (owner, _get(owner, name)))

    def _look_into(self, value: Any) -> int:
        """Returns 1 for a function."""
        if id(value) in self._seen:
            return 0
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            self._waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            self._waiting += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType):
            self._look_into_function(value)
            return 1
        elif isinstance(value, type):
            if _root(value) not in _FRAMEWORKS | {"retime"}:
                self._look_into_class(value)
        elif isinstance(value, nn.Module):
            self._waiting += {type(module): None for module in value.modules()}
        elif isinstance(value, list | tuple):
            self._waiting += value[:_MOST]
        elif isinstance(value, dict):
            self._waiting += dict.values(value)  # what is there: Transformers' lazy mappings would import all models
        elif not isinstance(value, _PLAIN) and _root(type(value)) not in _FRAMEWORKS | {"retime"}:
            self._waiting.append(type(value))
        return 0

    def _look_into_class(self, kind: type) -> None:
        self._waiting += kind.__bases__
        for name, value in list(vars(kind).items()):
            if isinstance(value, staticmethod | classmethod):
                self._waiting.append(value.__func__)
            elif isinstance(value, property):
                self._waiting += [one for one in (value.fget, value.fset) if one is not None]
            elif isinstance(value, types.FunctionType):
                self._waiting.append(value)
            elif isinstance(value, _PLAIN) and not name.startswith("__"):
                self._keep(kind, name)

    def _look_into_function(self, function: types.FunctionType) -> None:
        if _root(function) in _FRAMEWORKS:
            return
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._waiting += [_get(cell, "") for cell in cells.values()]
        self._waiting += [function.__dict__["__wrapped__"]] if "__wrapped__" in function.__dict__ else []
        if _root(function) == "retime":
            return  # its closures alone: they hold the user's step
        for code in _codes(function.__code__):
            for opname, name in _rebound(code):
                if opname in _GLOBAL:
                    self._keep(function.__globals__, name)
                elif name in cells:
                    self._keep(cells[name], name)
            self._follow(code.co_names, function.__globals__)

    def _follow(self, names: tuple[str, ...], known: dict[str, Any]) -> None:
        for name in names:
            value = known.get(name)
            if not isinstance(value, types.ModuleType):
                if value is not None:
                    self._waiting.append(value)
            elif value.__name__.partition(".")[0] not in _FRAMEWORKS | {"retime"}:
                attributes = vars(value)
                self._waiting += [attributes[one] for one in names if one in attributes]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _rebound(code: types.CodeType) -> list[tuple[str, str]]:
    if _REBINDING.isdisjoint(code.co_code[::2]):
        return []
    instructions = dis.get_instructions(code)
    return [(one.opname, one.argval) for one in instructions if one.opcode in _REBINDING]


def _root(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _get(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(name, _MISSING)
    if isinstance(owner, type):
        return vars(owner).get(name, _MISSING)
    try:
        return owner.cell_contents
    except ValueError:  # an empty one
        return _MISSING


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        if value is _MISSING:
            del owner.cell_contents
        else:
            owner.cell_contents = value
    elif value is _MISSING:
        owner.pop(name, None)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
