"""Whether a forward pass runs the same kernels in each call, so that they can be issued all at once (section 4.2).

A CUDA graph has what Python did while it was captured. So the code of each module's ``forward`` may read what is looked
at before each replay only: its arguments' forms, attributes of its modules, and constants. What calls operations of
torch on these is static; anything else is refused by its name.
"""

from __future__ import annotations

import builtins
import dis
import enum
import math
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.torch_private.engine import TorchDispatchMode, schema_of, tree_leaves
from retime.foundations.torch_private.nn_and_optim import own_buffers, own_parameters

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.Size)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MODULES_OF_TORCH = (torch, torch.nn, F, torch.functional, torch.special, torch.linalg, torch.fft, math)
_CODE_OF_TORCH = ("torch.nn.functional", "torch.functional", "math")
_BUILTINS = {
    *(len, range, zip, enumerate, tuple, list, dict, int, float, bool, str, min, max, sum, abs, round, slice),
    *(isinstance, super, reversed, sorted, all, any, ValueError, TypeError, RuntimeError, AssertionError),
    NotImplementedError,
}
_READS_WHAT_IS_NOT_THERE = {
    *("backward", "cpu", "cuda", "data", "data_ptr", "grad", "grad_fn", "is_leaf", "is_pinned", "item", "new_tensor"),
    *("numpy", "pin_memory", "record_stream", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *("resize_", "retain_grad", "set_", "share_memory_", "storage", "tolist", "untyped_storage"),
}
"""Attributes of tensors whose values a replay does not bring, or that are the host's."""
_FROM_THE_HOST = {"as_tensor", "asarray", "from_numpy", "frombuffer", "tensor"}
"""Copies of the host's memory, for which a device is waited."""
_REPLACED = {
    *("__bool__", "__call__", "__contains__", "__getattr__", "__getattribute__", "__getitem__", "__iter__"),
    *("__len__", "__setattr__"),
}
"""Methods that run without being named where they are used."""
_CHANGES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_", "STORE_DEREF", "BEFORE_")
_FIELDS = frozenset(vars(nn.Module()))
_OWN = "torch.nn.modules."


class StaticCode:
    """The code of a module and of those inside of it, read once.

    Args:
        module: whose forward pass is asked about.
        wrappers: classes of what may stand in a ``forward``'s place and call the class's own.

    Attributes:
        why_not: why it may run other kernels in another call; None: it runs the same ones as long as a
            :meth:`snapshot` holds, for inputs of one form, unless values reach the host.
    """

    def __init__(self, module: nn.Module, wrappers: tuple[type, ...] = ()) -> None:
        self._wrappers = wrappers
        self._modules = list(module.modules())
        self._users = [one for one in self._modules if not type(one).__module__.startswith(_OWN)]
        self._names: set[str] = set()
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._seen: set[types.CodeType] = set()
        self.why_not = next(self._reasons(), None)
        self._read = sorted(self._names | {"forward"})

    def snapshot(self) -> Snapshot:
        """Return all that the code reads beside its arguments, as it is now."""
        snapshot = Snapshot()
        for scope, name in self._globals.values():
            snapshot.add(scope, name)
        for kind in {kind for module in self._users for kind in type(module).__mro__ if kind is not object}:
            for name in self._read:
                snapshot.add(vars(kind), name)
        users = set(self._users)
        for module in self._modules:
            own = vars(module)
            snapshot.kinds.append((module, type(module)))
            for name in {*self._read, *(_FIELDS if module in users else own)}:
                snapshot.add(own, name)
        return snapshot

    def _reasons(self) -> Iterator[str]:
        functions: list[Any] = []
        for module in self._modules:
            if "forward" in vars(module) and not isinstance(vars(module)["forward"], self._wrappers):
                yield f"the forward method of a {type(module).__name__} was replaced"
            if isinstance(module, nn.RNNBase):
                yield f"{type(module).__name__} keeps its weights in a second place"
            if isinstance(module, torch.jit.ScriptModule):
                yield "some of it is scripted"
            if any(type(p) is not nn.Parameter for p in own_parameters(module).values() if p is not None):
                yield "it has parameters of a class of their own"
            if any(type(b) is not Tensor for b in own_buffers(module).values() if b is not None):
                yield "it has buffers of a class of their own"
        for module in self._users:
            for kind in type(module).__mro__:
                own = _REPLACED & set(vars(kind)) if not _is_torchs(kind) and kind is not object else set()
                if own:
                    yield f"{kind.__name__} has a {min(own)} of its own"
            functions.append(type(module).forward)
        while functions:
            while functions:
                yield from self._reasons_in(functions.pop(), functions)
            for module in self._users:  # what is found in attributes may be code too
                for name, value in vars(module).items():
                    if name not in self._names - _FIELDS - {"forward"}:
                        continue
                    if not self._is_known(value, functions):
                        yield f"its code uses {type(module).__name__}.{name}, which is a {type(value).__name__}"
            functions = [function for function in functions if getattr(function, "__code__", None) not in self._seen]

    def _reasons_in(self, function: Any, functions: list[Any]) -> Iterator[str]:
        if not isinstance(function, types.FunctionType):
            yield f"its code uses {getattr(function, '__qualname__', function)}, which is no Python function"
            return
        name = function.__qualname__
        if set(function.__code__.co_freevars) - {"__class__"}:
            yield f"{name} uses variables of the function around it"
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if not all(isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH)) for value in defaults):
            yield f"{name} has arguments by default that can change"
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            if code in self._seen:
                continue
            self._seen.add(code)
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            for step in dis.get_instructions(code):
                if step.opname.startswith(_CHANGES) and step.argval not in code.co_cellvars:
                    yield f"{name} changes or reads more than its arguments (at {step.argval})"
                elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    if not self._is_known_global(function.__globals__, step.argval, functions):
                        yield f"{name} uses {step.argval!r}"
                elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")) and not self._is_known_name(
                    step.argval, functions
                ):
                    yield f"{name} uses {step.argval!r}"

    def _is_known_global(self, scope: dict[str, Any], name: str, functions: list[Any]) -> bool:
        if name not in scope:
            value = getattr(builtins, name, None)
            return value in _BUILTINS
        self._globals[id(scope), name] = scope, name
        return self._is_known(scope[name], functions)

    def _is_known_name(self, name: str, functions: list[Any]) -> bool:
        """Return whether an attribute of this name is known, of whatever in the code it is."""
        if name in self._names:
            return True
        self._names.add(name)
        exists = False
        kinds = {kind for module in self._users for kind in type(module).__mro__ if name in vars(kind)}
        for kind in kinds - {nn.Module, object}:  # what super() may find too
            method = vars(kind)[name]
            if not self._is_known(getattr(method, "__func__", method), functions):
                return False
            exists = True
        if nn.Module in kinds and not exists:
            exists = name in ("forward", "children", "named_children") or hasattr(Tensor, name)
            if not exists:
                return False
        exists |= any(name in vars(module) or hasattr(module, name) for module in self._modules)
        for kind in (Tensor, list, tuple, dict, str):
            if hasattr(kind, name):
                if name in _READS_WHAT_IS_NOT_THERE or name.startswith("_"):
                    return False
                exists = True
        for package in _MODULES_OF_TORCH:
            value = getattr(package, name, None)
            if value is not None:
                if not self._is_known(value, None):
                    return False
                exists = True
        return exists

    def _is_known(self, value: Any, functions: list[Any] | None) -> bool:
        """Return whether a value is compared before each replay, or is code that is read, or torch's own."""
        if isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH)) or type(value) in (Tensor, nn.Parameter):
            return True
        if type(value) in (list, tuple):
            return all(self._is_known(one, functions) for one in value)
        if type(value) is dict:
            return all(self._is_known(one, functions) for pair in value.items() for one in pair)
        if isinstance(value, nn.Module):
            return any(value is one for one in self._modules)
        if isinstance(value, types.ModuleType):
            return value in _MODULES_OF_TORCH
        if isinstance(value, type):
            return (
                value in (Tensor, torch.Size, torch.device, torch.dtype)
                or _is_torchs(value)
                or any(isinstance(m, value) for m in self._modules)
            )
        if isinstance(value, types.BuiltinFunctionType):
            is_operation = value.__name__ not in _FROM_THE_HOST and hasattr(torch.ops.aten, value.__name__)
            return value.__module__ == "math" or is_operation
        if isinstance(value, types.FunctionType):
            if value.__module__ in _CODE_OF_TORCH:
                return True
            if functions is not None:
                functions.append(value)
                return True
        return False


class Snapshot:
    """Values that code reads, as they were when this was made; tensors by where they are.

    Attributes:
        kinds: modules and their classes.
    """

    def __init__(self) -> None:
        self.kinds: list[tuple[nn.Module, type]] = []
        self._entries: list[tuple[Callable[[Any, Any], Any], Any, Any]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._tensors: list[tuple[Tensor, tuple[Any, ...]]] = []

    def add(self, mapping: Any, key: Any) -> None:
        """Note what a mapping has under a key, or that it has nothing there."""
        value = mapping.get(key, _GONE)
        self._entries.append((mapping.get, key, value))
        self._look_into(value)

    def _look_into(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensors.append((value, _place(value)))
        elif isinstance(value, dict):
            self._sizes.append((value, len(value)))
            for key in value:
                self.add(value, key)
        elif isinstance(value, list | tuple):
            if isinstance(value, list):
                self._lists.append((value, list(value)))
            for one in value:
                self._look_into(one)

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        for get, key, value in self._entries:
            now = get(key, _GONE)
            if now is not value and not (type(now) is type(value) and isinstance(now, _PLAIN) and now == value):
                return False
        return (
            all(type(module) is kind for module, kind in self.kinds)
            and all(len(one) == size for one, size in self._sizes)
            and all(len(one) == len(was) and all(map(is_, one, was)) for one, was in self._lists)
            and all(_place(tensor) == place for tensor, place in self._tensors)
        )


_GONE = object()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.requires_grad, tensor.shape, tensor.stride(), tensor.dtype


def _is_torchs(kind: type) -> bool:
    return issubclass(kind, nn.Module) and kind.__module__.startswith(_OWN)


# What one run on copies shows, beside the code.


class NotStaticError(Exception):
    """An operation that a graph cannot have."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops before an operation that hands a value to the host, meets another device, or writes into what was there.

    Args:
        device: of all tensors.
        copies: that may be written into, beside what operations make.
    """

    def __init__(self, device: torch.device, copies: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._own = {one.untyped_storage().data_ptr() for one in copies}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        masks = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and any(
            one.dtype in (torch.bool, torch.uint8) for one in tensors[1:]
        )
        if any(tag in func.tags for tag in tags) or masks:
            raise NotStaticError(f"the host reads a value of it ({func})")
        if any(one.device != self._device for one in tensors):
            raise NotStaticError(f"it works with a tensor of another device ({func})")
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = (one for one in tree_leaves(value) if isinstance(one, Tensor))
                if any(one.untyped_storage().data_ptr() not in self._own for one in written if one.numel()):
                    raise NotStaticError(f"it writes into inputs, parameters or tensors that are no buffers ({func})")
        given = {one.untyped_storage().data_ptr() for one in tensors}
        outputs = func(*args, **(kwargs or {}))
        places = {one.untyped_storage().data_ptr() for one in tree_leaves(outputs) if isinstance(one, Tensor)}
        self._own |= places - given
        return outputs


def are_own(results: Sequence[Any], used: Sequence[Tensor]) -> bool:
    """Tell if results are dense tensors that need gradients and share no memory with one another and what is used."""
    if not results or not all(type(one) is Tensor and one.requires_grad for one in results):
        return False
    own, others = ({one.untyped_storage().data_ptr() for one in some} for some in (results, used))
    return (
        len(own) == len(results)
        and not others & own
        and all(torch.empty_like(one).stride() == one.stride() for one in results)
    )


def uses_of(results: Sequence[Tensor]) -> tuple[Counter[int], set[int]]:
    """Return how many edges of the autograd graph end at each leaf, by id, and which leaves are cast.

    Gradients of several edges add up inside of the part.
    """
    cast: set[int] = set()
    counts: Counter[int] = Counter()
    waiting = [result.grad_fn for result in results]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for other, _ in node.next_functions if node is not None else ():
            variable = getattr(other, "variable", None)
            if variable is not None:
                counts[id(variable)] += 1
                if node is not None and node.name().startswith("ToCopy"):
                    cast.add(id(variable))
            elif other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return counts, cast
