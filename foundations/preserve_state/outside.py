"""Tensors that a step reaches without asking its model get back what they were when a run is only tried out.

Nothing can stand in for a global variable, a closure's or a default argument. So operations are watched while the step
runs: what one of them is about to write into, and was there before, is kept first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retime.foundations.preserve_state.onlooker import Onlooker
from retime.foundations.preserve_state.value_reads import ValueReadError
from retime.foundations.storages import Window, has_storage, storage_key, storage_keys
from retime.foundations.torch_private import FakeTensor, OpOverload, base_of, schema_of, without_dispatch_modes

__all__ = ["Outside"]

_USED = (Tensor, torch.Generator)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Outside:
    """What runs of a step write into beside stand-ins: tensors, gradients of leaves, and generators' states.

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
        elif isinstance(used, Tensor) and has_storage(used) and not isinstance(used, FakeTensor):
            key = storage_key(used)
            if key in self._mine:
                return
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
        if not has_storage(tensor) or isinstance(tensor, FakeTensor) or storage_key(tensor) in self._mine:
            return
        if isinstance(value, FakeTensor):
            raise ValueReadError(
                "the step assigns to .data of a tensor that is no part of its model, where a dry run has no values to "
                "give: write into it (tensor.copy_(...)), or keep it as a buffer of the model"
            )
        self._note_binding(tensor)

    def made(self, out: object, given: object) -> None:
        """An operation returned this: storages that none of its arguments has are new."""
        new = storage_keys(_leaves(out, Tensor)) - self._mine
        if new:
            self._mine |= new - storage_keys(_leaves(given, Tensor))

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
    """What of this kind an operator is given or returns, alone or in lists; every operator call comes by here."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one, kind)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()), kind)


class _Watch(Onlooker):  # type: ignore[no-untyped-call]
    def __init__(self, outside: Outside) -> None:
        super().__init__()
        self._outside = outside

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)
        declared = _declared(func)
        named = [*zip(declared, args, strict=False), *((one, kwargs.get(one[0])) for one in declared[len(args) :])]
        for (_, written), value in named:
            for leaf in _leaves(value, _USED):
                self._outside.about_to_use(leaf, written)
        out = func(*args, **kwargs)
        self._outside.made(out, () if func is torch.ops.aten.lift_fresh.default else (args, kwargs))  # torch.tensor()
        return out


class _Bindings(TorchFunctionMode):
    """Sees assignments to ``tensor.data``, which are no operation."""

    def __init__(self, outside: Outside) -> None:
        super().__init__()
        self._outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            self._outside.about_to_bind(*args)
        return func(*args, **(kwargs or {}))
