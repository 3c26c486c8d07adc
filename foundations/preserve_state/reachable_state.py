"""What modules hold beside one another: tensors and where they are, containers, random generators, arrays.

One walk serves all that run a model without a trace: it finds what has to be noted so that it can be put back, and the
places in which other tensors can stand in for a while.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ReachableState", "Slots", "replaced"]

_NOTHING_IN_IT = (bool, int, float, complex, str, bytes, type(None), range, slice, type, torch.dtype, torch.device)
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.jit.ScriptFunction,
)
_OF_THREADS = {"threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "subprocess"}
# What these keep is their own affair; a Trainer, say, goes on while a step is tried out.
_FRAMEWORKS = {*sys.stdlib_module_names, "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
_FRAMEWORKS |= {"retime", "numpy"}
_PLAIN_ALL_THE_SAME = (types.SimpleNamespace, argparse.Namespace, torch.distributions.Distribution)


class Slots(MutableMapping[str, Any]):
    """The attributes that an object keeps in slots, as a mapping."""

    def __init__(self, owner: object, names: Iterable[str]) -> None:
        self._owner, self._names = owner, list(names)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # frozen dataclasses too

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ReachableState:
    """Everything that is found in modules' attributes: by itself, in dicts, lists, sets, deques, tuples and partials.

    So are the attributes of objects that are found there, but not of objects in these: one level deep. Modules are
    looked into wherever they are, as in a list that hides them from their parent. Left alone are optimizers, trainers
    and other objects of frameworks and of the standard library, and objects that share their state with threads.

    Args:
        modules: where to begin.

    Attributes:
        modules: these, and all that were found.
        containers: dicts, lists, sets, deques and :class:`Slots`; an object's ``__dict__`` is one.
        places: containers and keys at which there is a tensor, or a tuple or partial with one in it.
        generators: of random numbers, of torch, NumPy and Python.
        arrays: of NumPy.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules: list[nn.Module] = []
        self.containers: list[Any] = []
        self.places: list[tuple[Any, Any]] = []
        self.generators: list[Any] = []
        self.arrays: list[Any] = []
        self._known: dict[int, Any] = {}  # by id, which must stay taken
        self._waiting: list[tuple[Any, bool]] = []
        for module in modules:
            self._known[id(module)] = module
            self._add_module(module)
        while self._waiting:
            self._look_into(*self._waiting.pop())
        self._known.clear()

    def _find(self, value: Any, in_object: bool) -> bool:
        """Note a value; whether another one must take its place when tensors are replaced."""
        if isinstance(value, _NOTHING_IN_IT):
            return False
        if isinstance(value, Tensor):
            return True
        if isinstance(value, tuple):
            return self._find_all(value, in_object) and _can_be_rebuilt(value)
        if type(value) is functools.partial:
            return self._find_all((*value.args, *value.keywords.values()), in_object)
        if id(value) not in self._known:
            self._known[id(value)] = value
            self._note(value, in_object)
        return False

    def _find_all(self, values: Iterable[Any], in_object: bool) -> bool:
        found = [self._find(value, in_object) for value in values]  # all of them, even if the first one is a tensor
        return any(found)

    def _note(self, value: Any, in_object: bool) -> None:
        numpy = sys.modules.get("numpy")
        if isinstance(value, nn.Module):
            if not isinstance(value, DistributedDataParallel):  # what it keeps is for communication
                self._add_module(value)
        elif isinstance(value, dict | list | set | deque):
            self._add(value, in_object)
        elif _is_generator(value):
            self.generators.append(value)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            self.arrays.append(value)
        elif not in_object and _is_plain(value):
            for attributes in _attributes(value):
                self._add(attributes, in_object=True)

    def _add_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        self._add(module.__dict__, in_object=False)

    def _add(self, container: Any, in_object: bool) -> None:
        self.containers.append(container)
        self._waiting.append((container, in_object))

    def _look_into(self, container: Any, in_object: bool) -> None:
        if isinstance(container, set):
            for value in container:
                self._find(value, in_object)
            return
        for key, value in container.items() if isinstance(container, dict | Slots) else enumerate(container):
            if self._find(value, in_object):
                self.places.append((container, key))


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What is to be at a place instead: a tensor, a tuple or a partial."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and _can_be_rebuilt(value):
        children = [replaced(child, change) for child in value]
        return value._make(children) if hasattr(value, "_make") else tuple(children)
    if type(value) is functools.partial:
        named = {name: replaced(child, change) for name, child in value.keywords.items()}
        return functools.partial(value.func, *(replaced(child, change) for child in value.args), **named)
    return value


def _can_be_rebuilt(value: tuple[Any, ...]) -> bool:
    return type(value) is tuple or hasattr(value, "_make")


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)  # it has no state
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return isinstance(value, kinds)


def _is_plain(value: Any) -> bool:
    """Whether an object's attributes are the model's own state."""
    if isinstance(value, _PLAIN_ALL_THE_SAME):
        return True
    if isinstance(value, (*_CODE, torch.optim.Optimizer)) or _root(type(value)) in _FRAMEWORKS:
        return False
    held = (child for attributes in _attributes(value) for child in attributes.values())
    kinds = chain(type(value).__mro__, *(type(child).__mro__ for child in held))
    return all(_root(kind) not in _OF_THREADS for kind in kinds)


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _attributes(value: Any) -> Iterator[Any]:
    named = getattr(value, "__dict__", None)
    if isinstance(named, dict):
        yield named
    declared = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    if names := [name for name in names if name not in ("__dict__", "__weakref__")]:
        yield Slots(value, names)
