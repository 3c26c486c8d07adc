"""Tensors that a step reaches without asking its model get back what they were when a run is only tried out.

Nothing can stand in for a global variable, a closure's or a default argument. So operations are watched while the step
runs: what one of them is about to write into, and was there before, is kept first.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from retime.foundations.storages import Window, has_storage, storage_key, storage_keys
from retime.foundations.torch_private.engine import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    schema_of,
    without_dispatch_modes,
)
from retime.foundations.torch_private.tensors import base_of

# Modes that look on while a step is trained for real.


class ObserverMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation, and changes none: compiled code stays compiled, and what it does inside is not seen."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch would else run what was compiled without its compiled code."""
        return True


# Steps that read values, which fake tensors do not have.


class ValueReadError(RuntimeError):
    """A step reads a tensor's value, or makes a tensor whose size depends on one: fake tensors have no values."""


# Names that a step binds anew, beside its model: global variables, variables of enclosing functions, class attributes.
#
# ``global calls; calls += 1`` writes into no object that could be copied. So the code that a step may run is searched
# for such assignments, and the values that they replace are kept.

_MISSING = object()
_FRAMEWORKS = {*sys.stdlib_module_names, "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
_FRAMEWORKS |= {"numpy", "torchmetrics"}
LIBRARIES = _FRAMEWORKS | {"retime"}
"""Packages whose objects keep what is their own affair."""
_GLOBAL, _ENCLOSING = {"STORE_GLOBAL", "DELETE_GLOBAL"}, {"STORE_DEREF", "DELETE_DEREF"}
_REBINDING = {dis.opmap[name] for name in _GLOBAL | _ENCLOSING}
_MOST = 5000
"""So many functions are looked into, the step's own first."""
_PLAIN = (bool, int, float, str, type(None))


class GlobalsSnapshot:
    """Values that such names are bound to when this is made.

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
        """Return the names that are bound to numbers now."""
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
            if root_of(value) not in LIBRARIES:
                self._look_into_class(value)
        elif isinstance(value, nn.Module):
            self._waiting += {type(module): None for module in value.modules()}
        elif isinstance(value, list | tuple):
            self._waiting += value[:_MOST]
        elif isinstance(value, dict):
            self._waiting += dict.values(value)  # what is there: Transformers' lazy mappings would import all models
        elif not isinstance(value, _PLAIN) and root_of(type(value)) not in LIBRARIES:
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
        if root_of(function) in _FRAMEWORKS:
            return
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._waiting += [_get(cell, "") for cell in cells.values()]
        self._waiting += [function.__dict__["__wrapped__"]] if "__wrapped__" in function.__dict__ else []
        if root_of(function) == "retime":
            return  # its closures alone: they hold the user's step
        for code in _codes(function.__code__):
            for opname, name in _rebound(code):
                if opname in _GLOBAL:
                    self._keep(function.__globals__, name)
                elif name in cells:
                    self._keep(cells[name], name)
            self._follow(code.co_names, function.__globals__)

    def _follow(self, names: tuple[str, ...], namespace: dict[str, Any]) -> None:
        for name in names:
            value = namespace.get(name)
            if not isinstance(value, types.ModuleType):
                if value is not None:
                    self._waiting.append(value)
            elif value.__name__.partition(".")[0] not in LIBRARIES:
                attributes = vars(value)
                self._waiting += [attributes[one] for one in names if one in attributes]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4 * _MOST)
def _rebound(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    if _REBINDING.isdisjoint(code.co_code[::2]):
        return ()
    instructions = dis.get_instructions(code)
    return tuple((one.opname, one.argval) for one in instructions if one.opcode in _REBINDING)


def root_of(value: Any) -> str:
    """Return the package that a class or a function is of."""
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


_USED = (Tensor, torch.Generator)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class ExternalTensors:
    """Objects that runs of a step write into beside stand-ins: tensors, gradients of leaves, and generators' states.

    Attributes and variables that are bound to other tensors are not seen, nor is what is no tensor. A tensor that is
    bound to other memory (``tensor.data = value``, ``tensor.set_(value)``) is.

    Args:
        stand_ins: may be written into.
        gradients: whether leaves are to have none in a run, and theirs again afterwards.
    """

    def __init__(self, stand_ins: Iterable[Tensor] = (), *, gradients: bool = True) -> None:
        self._mine = storage_keys(stand_ins)  # and all that runs make: no other storage has had such a key since
        self._puts_gradients_aside = gradients
        self._stored: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._bound: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._states: dict[int, tuple[torch.Generator, Tensor]] = {}

    @contextmanager
    def put_back_after(self, watched: bool = True) -> Iterator[None]:
        """Around a run, or several with :meth:`put_back` and :meth:`begin` between them.

        Args:
            watched: else only what other runs have touched is put back: watching takes time.
        """
        self.begin()
        try:
            with self.watched() if watched else nullcontext():
                yield
        finally:
            self.put_back()

    @contextmanager
    def watched(self, bindings: bool = True) -> Iterator[None]:
        """Around what :meth:`put_back` may undo.

        Args:
            bindings: assignments to ``tensor.data`` too. To see them a mode is needed that compiled code is compiled
                anew for.
        """
        with _Watch(self), _Bindings(self) if bindings else nullcontext():
            yield

    def begin(self) -> None:
        """A run finds no gradients at leaves that it will use."""
        for leaf, _ in self._gradients.values():
            leaf.grad = None

    def put_back(self) -> None:
        """All is as it was; it stays noted, for other runs."""
        with without_dispatch_modes(), torch.no_grad():
            for storage, value in self._stored.values():
                if storage.nbytes() != value.nbytes():
                    storage.resize_(value.nbytes())
                storage.copy_(value)
            for tensor, before in self._bound.values():
                if storage_key(tensor) != storage_key(before) or Window.of(tensor) != Window.of(before):
                    tensor.data = before
            for leaf, gradient in self._gradients.values():
                leaf.grad = gradient
            for generator, state in self._states.values():
                generator.set_state(state)

    def about_to_use(self, used: object, written: bool) -> None:
        """An operation is given this: note what is put back afterwards."""
        if isinstance(used, torch.Generator):
            if id(used) not in self._states:
                with without_dispatch_modes():
                    self._states[id(used)] = used, used.get_state()
        elif not isinstance(used, Tensor) or not (written or (used.is_leaf and used.requires_grad)):
            return
        elif has_storage(used) and (key := storage_key(used)) not in self._mine:
            if written:
                self._keep(key, used)
            if self._puts_gradients_aside and used.requires_grad and used.is_leaf and id(used) not in self._gradients:
                self._gradients[id(used)] = used, used.grad
                used.grad = None

    def about_to_bind(self, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``: the tensor is to be another window, on another storage.

        Raises:
            ValueReadError: the value is a dry run's: the tensor would have none any more.
        """
        if isinstance(tensor, FakeTensor) or not has_storage(tensor) or storage_key(tensor) in self._mine:
            return
        if isinstance(value, FakeTensor):
            raise ValueReadError(
                "the step assigns to .data of a tensor that is no part of its model, where a dry run has no values to "
                "give: write into it (tensor.copy_(...)), or keep it as a buffer of the model"
            )
        self._note_binding(tensor)

    def made(self, out: object, given: Iterable[Tensor]) -> None:
        """An operation returned this: storages that none of its arguments has are new."""
        real = [leaf for leaf in _leaves(out, Tensor) if not isinstance(leaf, FakeTensor)]
        new = storage_keys(real) - self._mine if real else set()
        if new:
            self._mine |= new - storage_keys(given)

    def _keep(self, key: int, tensor: Tensor) -> None:
        if key not in self._stored:
            storage = tensor.untyped_storage()
            with without_dispatch_modes():
                self._stored[key] = storage, storage.clone()  # type: ignore[no-untyped-call]
        self._note_binding(tensor)

    def _note_binding(self, tensor: Tensor) -> None:
        if id(tensor) not in self._bound and base_of(tensor) is None:
            with without_dispatch_modes():
                self._bound[id(tensor)] = tensor, tensor.detach()


@cache
def _declared(func: OpOverload) -> tuple[tuple[str, bool], ...]:
    """An operator's arguments: their names, and whether it writes into them."""
    schema = schema_of(func)
    unsaid = "batch_norm" in schema.name  # its kernels do not say that they write into running statistics
    return tuple(
        (one.name, unsaid or (one.alias_info is not None and one.alias_info.is_write)) for one in schema.arguments
    )


def _leaves(value: object, kind: Any) -> Iterator[Any]:
    """Yield what of this kind an operator is given or returns, alone or in lists; every operator call comes by here."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one, kind)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()), kind)


class _Watch(ObserverMode):  # type: ignore[no-untyped-call]
    def __init__(self, outside: ExternalTensors) -> None:
        super().__init__()
        self._outside = outside

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)
        declared = _declared(func)
        named = [*zip(declared, args, strict=False)]
        if kwargs:
            named += [(one, kwargs[one[0]]) for one in declared[len(args) :] if one[0] in kwargs]
        used = [(leaf, written) for (_, written), value in named for leaf in _leaves(value, _USED)]
        for leaf, written in used:
            if type(leaf) is not FakeTensor:
                self._outside.about_to_use(leaf, written)
        out = func(*args, **kwargs)
        if type(out) is FakeTensor:
            return out
        given = [] if func is torch.ops.aten.lift_fresh.default else [leaf for leaf, _ in used]  # torch.tensor()
        self._outside.made(out, [leaf for leaf in given if isinstance(leaf, Tensor)])
        return out


class _Bindings(TorchFunctionMode):
    """Sees assignments to ``tensor.data``, which are no operation."""

    def __init__(self, outside: ExternalTensors) -> None:
        super().__init__()
        self._outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            self._outside.about_to_bind(*args)
        return func(*args, **(kwargs or {}))
