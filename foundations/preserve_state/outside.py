"""Writes outside of the model, which a run that is only tried out could not take back: found, and refused before."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from retime.foundations.messages import users_line
from retime.foundations.storages import has_storage, storage_key, storage_keys
from retime.foundations.torch_private.engine import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    schema_of,
    without_dispatch_modes,
)

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


class ValueReadError(RuntimeError):
    """A step reads a tensor's value, or makes a tensor whose size depends on one: fake tensors have no values."""


class ExternalWriteError(RuntimeError):
    """A step that is only tried out is about to change something outside of its model; nothing was changed."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(
            f"the step {what} outside of its model, which a run that is only tried out cannot take back: {instead}, or "
            "give dry_run='off', which never calls the step more often than training does"
        )


# Writes that can be told from the code that a step may run: names that it binds anew, and global or enclosing
# variables whose entries or attributes it changes.

LIBRARIES = {*sys.stdlib_module_names, "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
LIBRARIES |= {"numpy", "torchmetrics", "retime"}
"""Packages whose objects keep what is their own affair."""
_UNREAD = LIBRARIES | {"transformers"}
"""Packages whose code is not looked into."""
_MOST = 5000
"""So many functions are looked into, the step's own first."""
_CONTAINERS = (list, dict, set, deque, types.SimpleNamespace)
_METHODS = {"append", "appendleft", "extend", "insert", "pop", "popleft", "clear", "add", "discard", "update"}
_METHODS |= {"remove", "setdefault", "popitem"}
_GLOBAL, _ENCLOSING = ("STORE_GLOBAL", "DELETE_GLOBAL"), ("STORE_DEREF", "DELETE_DEREF")
_END = (("", None, None), ("", None, None))
_ASKED = {"forward", "training_step", "compute_loss"}
"""Methods that frameworks call; all others are looked into where code that is looked into has their name."""
_NOT_ASKED = {"__init_subclass__", "__class_getitem__", "__set_name__", "__repr__", "__str__", "__del__"}


def external_write(step: Any, model: nn.Module) -> ExternalWriteError | None:
    """Find code that changes a global or enclosing variable, or a class's attribute; None where there is none.

    Looked into are functions that ``step`` reaches by its closures and global names, and methods of the model's modules
    and of what the step reaches, if their names are mentioned. What Python, torch, Lightning and transformers change
    themselves is their own affair.

    Args:
        step: what will run.
        model: what it trains; its attributes may be changed.
    """
    for function in _reached(step, model):
        for code in _codes(function.__code__):
            if (written := _written_by(code, function)) is not None:
                where = f"{code.co_filename.rpartition('/')[2]}:{written[1]}"
                return ExternalWriteError(f"changes {written[0]} ({where})", "keep it in an attribute of the model")
    return None


def _reached(step: Any, model: nn.Module) -> Iterator[types.FunctionType]:
    """Yield the functions of the user's own that a step may call."""
    seen: dict[int, Any] = {}
    waiting: deque[Any] = deque([step, *dict.fromkeys(map(type, model.modules()))])
    names, unnamed, functions = set[Any](_ASKED), dict[Any, list[Any]](), 0
    while waiting and functions < _MOST:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            waiting += _enclosed(value).values()
            waiting += [value.__dict__["__wrapped__"]] if "__wrapped__" in value.__dict__ else []
            if str(value.__globals__.get("__name__")).partition(".")[0] in _UNREAD:  # also of a decorated function
                continue  # its closures alone: they hold what is the user's
            functions += 1
            yield value
            for code in _codes(value.__code__):
                waiting += _named(code.co_names, value.__globals__)
                new = {*code.co_names, *(code.co_consts if "getattr" in code.co_names else ())}
                waiting += [one for name in new for one in unnamed.pop(name, ())]
                names |= new
        elif isinstance(value, type):
            if root_of(value) not in _UNREAD:
                waiting += value.__bases__
                for name, method in _methods(value):
                    asked = name in names or (name.startswith("__") and name not in _NOT_ASKED)
                    (waiting if asked else unnamed.setdefault(name, [])).append(method)
        else:
            waiting += _held(value)


def _methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in list(vars(kind).items()):
        for one in (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),):
            is_made = name == "__init__" and issubclass(kind, nn.Module)  # before the step
            if isinstance(one, types.FunctionType) and not is_made:
                yield name, one


def _held(value: Any) -> list[Any]:
    """Return what may run where an object that is no code is at hand."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, nn.Module):
        return list(dict.fromkeys(map(type, value.modules())))
    if isinstance(value, list | tuple):
        return list(value[:_MOST])
    if isinstance(value, dict):
        return list(dict.values(value))  # what is there: Transformers' lazy mappings would import all models
    return [] if root_of(type(value)) in _UNREAD else [type(value)]


def _named(names: tuple[str, ...], namespace: dict[str, Any]) -> Iterator[Any]:
    for value in (namespace[name] for name in names if name in namespace):
        if not isinstance(value, types.ModuleType):
            yield value
        elif value.__name__.partition(".")[0] not in _UNREAD:
            yield from (vars(value)[name] for name in names if name in vars(value))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _enclosed(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of variables of enclosing functions; an empty one has none."""
    values = dict.fromkeys(function.__code__.co_freevars)
    for name, cell in zip(values, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def _written_by(code: types.CodeType, function: types.FunctionType) -> tuple[str, int | None] | None:
    """Return what code in a function changes outside of it, and in which line."""
    instructions, namespace, outer = _instructions(code), function.__globals__, _enclosed(function)
    for number, (name, value, line) in enumerate(instructions):
        if name in _GLOBAL or (name in _ENCLOSING and value in outer):
            return f"the variable {value}", line
        (after, of, _), (then, _, _) = (*instructions[number + 1 : number + 3], *_END)[:2]
        attribute = after in ("STORE_ATTR", "DELETE_ATTR") or (after == "COPY" and then == "LOAD_ATTR")
        if attribute and (value in ("cls", "__class__") or (name == "CALL" and "type" in code.co_names)):
            return "an attribute of a class", line
        if name in ("LOAD_GLOBAL", "LOAD_DEREF"):
            owner = (namespace if name == "LOAD_GLOBAL" else outer).get(value)
            method = after in ("LOAD_METHOD", "LOAD_ATTR") and of in _METHODS
            entry = then in ("STORE_SUBSCR", "DELETE_SUBSCR", "COPY")
            if (attribute and _is_external(owner)) or ((method or entry) and isinstance(owner, _CONTAINERS)):
                return f"{value}, a global variable or one of an enclosing function,", line
    return None


@functools.lru_cache(maxsize=_MOST)
def _instructions(code: types.CodeType) -> tuple[tuple[str, Any, int | None], ...]:
    return tuple((i.opname, i.argval, i.positions and i.positions.lineno) for i in dis.get_instructions(code))


def _is_external(owner: Any) -> bool:
    """Return whether an object is nobody's but the user's; of the model's modules, attributes come back."""
    if isinstance(owner, types.ModuleType):
        return owner.__name__.partition(".")[0] not in _UNREAD
    if isinstance(owner, (*_CONTAINERS, Tensor)):
        return True
    kind = owner if isinstance(owner, type) else type(owner)
    return not isinstance(owner, nn.Module | types.FunctionType) and root_of(kind) not in _UNREAD


def root_of(value: Any) -> str:
    """Return the package that a class or a function is of."""
    return str(getattr(value, "__module__", "")).partition(".")[0]


# Writes that are seen as they come: operations on tensors and generators that nothing stands in for.

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Refused(BaseException):  # no error: a step's own `except` lets it by
    """Ends a run before it writes."""


class ExternalTensors:
    """Guard of tensors that runs of a step reach beside stand-ins: they are not written into.

    Their gradients and states of generators come back. Names that are bound to other tensors are not seen.

    Args:
        stand_ins: may be written into.
        gradients: whether leaves are to have none in a run, and theirs again afterwards.
    """

    def __init__(self, stand_ins: Iterable[Tensor] = (), *, gradients: bool = True) -> None:
        self._mine = storage_keys(stand_ins)  # and all that runs make: no other storage has had such a key since
        self._puts_gradients_aside = gradients
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._states: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._refused: ExternalWriteError | None = None

    @contextmanager
    def preserved(self, watched: bool = True, *, bindings: bool = True) -> Iterator[None]:
        """Around a run, or several with :meth:`put_back` and :meth:`begin` between them.

        Args:
            watched: else only what other runs have used comes back: watching takes time.
            bindings: see :meth:`guarded`, which also tells what is raised.
        """
        self.begin()
        try:
            with self.guarded(bindings=bindings) if watched else nullcontext():
                yield
        finally:
            self.put_back()

    @contextmanager
    def guarded(self, *, bindings: bool = True) -> Iterator[None]:
        """Around runs that are not to write.

        Args:
            bindings: refuse assignments to ``tensor.data`` too. To see them a mode is needed that compiled code is
                compiled anew for.

        Raises:
            ExternalWriteError: an operation was about to write into a tensor; it has not.
        """
        try:
            with _Watch(self), _Bindings(self) if bindings else nullcontext():
                yield
        except BaseException:
            if self._refused is None:
                raise
        if self._refused is not None:  # also where the step went on all the same
            raise self._refused

    def begin(self) -> None:
        """A run finds no gradients at leaves that it will use."""
        for leaf, _ in self._gradients.values():
            leaf.grad = None

    def put_back(self) -> None:
        """Gradients and generators are as they were; they stay noted, for other runs."""
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        for generator, state in self._states.values():
            generator.set_state(state)

    def about_to_use(self, leaf: Tensor) -> None:
        """Put the gradient of a leaf aside that an operation is given."""
        if id(leaf) not in self._gradients and self._puts_gradients_aside and self._is_external(leaf):
            self._gradients[id(leaf)] = leaf, leaf.grad
            leaf.grad = None

    def about_to_write(self, written: object, operation: str) -> None:
        """An operation writes into this tensor or list of tensors, or draws from this generator.

        Raises:
            _Refused: into a tensor that is no stand-in, and that no run has made.
        """
        if isinstance(written, torch.Generator) and id(written) not in self._states:
            with without_dispatch_modes():
                self._states[id(written)] = written, written.get_state()
        for tensor in filter(self._is_external, _tensors(written)):
            shape = "x".join(map(str, tensor.shape)) or "one entry"
            what = f"writes into a tensor of {shape} ({operation} at {users_line()})"
            self._refused = ExternalWriteError(what, "keep it as a buffer of the model")
            raise _Refused

    def made(self, out: object, given: Sequence[Any]) -> None:
        """An operation returned this: storages that none of its arguments has are new."""
        real = [leaf for leaf in _tensors(out) if type(leaf) is not FakeTensor]
        new = storage_keys(real) - self._mine if real else set()
        if new:
            self._mine |= new - storage_keys([*_tensors(given)])

    def _is_external(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and has_storage(tensor) and storage_key(tensor) not in self._mine


@cache
def _written(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return positions and names of an operator's arguments that it may write into."""
    schema = schema_of(func)
    # Batch norm's kernels do not say that they write into running statistics.
    unsaid = ("running_mean", "running_var") if "batch_norm" in schema.name and "backward" not in schema.name else ()
    return tuple(
        (position, one.name)
        for position, one in enumerate(schema.arguments)
        if (one.alias_info is not None and one.alias_info.is_write) or one.name in (*unsaid, "generator")
    )


@cache
def _training(func: OpOverload) -> int:
    """Return the position of the argument ``training``, without which batch norm writes nothing; -1: there is none."""
    return next((at for at, one in enumerate(schema_of(func).arguments) if one.name == "training"), -1)


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield tensors that an operator is given or returns, alone or in lists; every operator call comes by here."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


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
        for position, name in _written(func):
            written = args[position] if position < len(args) else kwargs.get(name)
            if name.startswith("running") and _training(func) >= 0 and not args[_training(func)]:
                continue
            self._outside.about_to_write(written, str(func).removeprefix("aten."))
        given = (args, tuple(kwargs.values()))
        for leaf in _tensors(given):
            if type(leaf) is not FakeTensor and leaf.requires_grad and leaf.is_leaf:
                self._outside.about_to_use(leaf)
        out = func(*args, **kwargs)
        if type(out) is not FakeTensor:
            self._outside.made(out, () if func is torch.ops.aten.lift_fresh.default else given)  # torch.tensor()
        return out


class _Bindings(TorchFunctionMode):
    """Refuses assignments to ``tensor.data``, which are no operation."""

    def __init__(self, outside: ExternalTensors) -> None:
        super().__init__()
        self._outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            self._outside.about_to_write(args[0], "an assignment to .data")
        return func(*args, **(kwargs or {}))
