"""A call that stops on its way and goes on later: a user's training step, cut where its layers lie on other ranks.

Each call runs in a thread of its own, but only one of them, or the caller, runs at any time. So what a thread keeps to
itself (grad mode, autocast, saved-tensor hooks) stays with its micro-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.parts import tensors_of
from retime.foundations.patching import replaced_attributes
from retime.foundations.preserve_state import seed_torch
from retime.foundations.torch_private.engine import tree_flatten, tree_map
from retime.foundations.torch_private.tensors import base_of, kept_version

# Hooks at the layers of a model, where a step stops, or goes past what lies on another rank.


class LayerHandler:
    """Decides what each layer does when it is called; this one lets all run here, as they are."""

    def before(self, layer: int, args: Any, kwargs: Any) -> Any:
        """A layer is called; other arguments for it and keywords, or None."""

    def is_here(self, layer: int) -> bool:
        """Return whether it runs on this rank."""
        return True

    def instead(self, layer: int, args: Any, kwargs: Any) -> Any:
        """Output of a layer that does not run here."""
        raise AssertionError

    def after(self, layer: int, output: Any) -> Any:
        """Output of a layer that has run here."""
        return output


class LayerInterceptors:
    """Lets a handler decide what the layers of a model do; without one they do what they ever did.

    Args:
        layers: in forward order.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.handler: LayerHandler | None = None
        self.around: Callable[[nn.Module], AbstractContextManager[None]] | None = None
        """Gives the context in which a layer runs, for layers that have their values only then."""
        self._layers = list(layers)
        self._handles = [
            layer.register_forward_pre_hook(_Before(self, number), prepend=True, with_kwargs=True)
            for number, layer in enumerate(layers)
        ]
        for number, layer in enumerate(layers):
            vars(layer)["forward"] = _Gate(self, number, layer)

    def handled_by(self, handler: LayerHandler) -> AbstractContextManager[None]:
        """Inside, this handler decides."""
        return replaced_attributes(self, handler=handler)

    def remove(self) -> None:
        """Give the layers their own ``forward`` back."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            gate = vars(layer).get("forward")
            if isinstance(gate, _Gate):
                gate.take_out()


class _Before:
    """A hook in front of a layer; in a copy of the model, which is a plain model, it does nothing."""

    def __init__(self, gates: LayerInterceptors | None, number: int) -> None:
        self._gates, self._number = gates, number

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        handler = None if self._gates is None else self._gates.handler
        return None if handler is None else handler.before(self._number, args, kwargs)

    def __reduce__(self) -> Any:
        return _Before, (None, self._number)


class _Gate:
    """Stands in the place of a layer's ``forward``."""

    def __init__(self, gates: LayerInterceptors | None, number: int, layer: nn.Module, own: Any = None) -> None:
        self._gates, self._number, self._layer = gates, number, layer
        self._own = vars(layer).get("forward") if own is None else own

    def take_out(self) -> None:
        if self._own is None:
            del vars(self._layer)["forward"]
        else:
            vars(self._layer)["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = None if self._gates is None else self._gates.handler
        if handler is None:
            return self._forward(*args, **kwargs)
        if not handler.is_here(self._number):
            return handler.instead(self._number, args, kwargs)
        return handler.after(self._number, self._forward(*args, **kwargs))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._own or partial(type(self._layer).forward, self._layer)
        if self._gates is None or self._gates.around is None:
            return forward(*args, **kwargs)
        with self._gates.around(self._layer):
            return forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _Gate, (None, self._number, self._layer, self._own)


# What goes into a layer and comes out: nested values taken apart, their tensors' shapes, and stand-ins for them.


@dataclass(frozen=True)
class TensorSpec:
    """Description of a tensor, without its values.

    Attributes:
        requires_grad: whether a gradient goes back to it.
        written: code between the layers writes into it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    written: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return what describes a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Memory for one."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def stand_in(self, device: torch.device) -> Tensor:
        """A tensor of this kind: not a number, so that whoever reads it shows. Only one to write into has memory."""
        value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        if self.written:
            return torch.full(self.shape, value, dtype=self.dtype, device=device)
        one = torch.full((1,), value, dtype=self.dtype, device=device)
        # not by expand(): a view cannot become another tensor
        return one.new_empty(0).set_(one.untyped_storage(), 0, self.shape, (0,) * len(self.shape))


@dataclass(frozen=True)
class ValueSpec:
    """A nested value with the specs of its tensors in their places.

    Attributes:
        value: what is neither tensor, number nor text is None in it.
    """

    value: Any

    def stand_in(self, device: torch.device) -> Any:
        """A value of this kind; see :meth:`TensorSpec.stand_in`."""
        return tree_map(lambda leaf: leaf.stand_in(device) if isinstance(leaf, TensorSpec) else leaf, self.value)

    def with_written(self, numbers: Container[int]) -> ValueSpec:
        """The same, of which code between the layers writes into some tensors, by their numbers in order."""
        counter = count()

        def mark(leaf: Any) -> Any:
            return replace(leaf, written=next(counter) in numbers) if isinstance(leaf, TensorSpec) else leaf

        return ValueSpec(tree_map(mark, self.value))

    @property
    def tensors(self) -> list[TensorSpec]:
        """The specs of its tensors, in order."""
        return [leaf for leaf in tree_flatten(self.value)[0] if isinstance(leaf, TensorSpec)]


def spec_of(value: Any) -> ValueSpec:
    """Return the spec of a nested value."""

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return TensorSpec.of(leaf)
        return leaf if isinstance(leaf, bool | int | float | str) else None

    return ValueSpec(tree_map(spec, value))


def tensors_in_order(value: Any) -> list[Tensor]:
    """The tensors of a nested value."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def replaced_tensors(value: Any, tensors: dict[int, Tensor]) -> Any:
    """A copy of a nested value with other tensors at some places of :func:`tensors_in_order`."""
    counter = count()
    return tree_map(lambda leaf: tensors.get(next(counter), leaf) if isinstance(leaf, Tensor) else leaf, value)


def shapes_of(value: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and types of a nested value's tensors: what tells one kind of batch from another."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in_order(value))


def shapes_of_batch(batch: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """The same of a batch or a part of it, dataclasses and mappings of any class included."""
    return shapes_of(list(tensors_of(batch).values()))


def leads_to(old: Tensor, new: Tensor, *, has_backward: bool, written: bool) -> tuple[Tensor, Tensor]:
    """Let a tensor, wherever user code holds it, have the values of another, and its graph end there.

    Args:
        old: came from a layer, or stands for what did. A view stays what it is.
        new: without a graph, but it may need a gradient.
        has_backward: the graph of ``old`` is run backward on this rank.
        written: a layer writes into it.

    Returns:
        What to use in the place of ``old``, itself where that can be; and the leaf that gets the gradient.
    """
    if base_of(old) is not None:
        return new.clone() if written else new, new
    old.detach_().data = new.detach()
    if not new.requires_grad:
        return old, new
    # no leaf, so that layers may write into it, as ReLU(inplace=True) does
    with kept_version(old):  # the graph, or a checkpoint, may have saved it, so it must not count as written into
        led: Tensor = _LeadsTo.apply(old, new)  # type: ignore[no-untyped-call]
    return led.clone() if written and has_backward else led, new


class _LeadsTo(torch.autograd.Function):
    """A tensor without a graph, as if it had been computed from another with the same values."""

    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor) -> Tensor:
        ctx.mark_dirty(old)
        return old

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


class _Here(threading.local):
    call: SuspendedCall | None = None


HERE = _Here()
"""Its ``call`` is the one that this thread runs."""
_OTHER_NUMBERS = 0x9E3779B97F4A7C15
"""Layers of one micro-batch draw from seeds that are this far apart."""


@dataclass(frozen=True)
class Returned:
    """The call has come to its end."""

    value: Any


class _Closed(BaseException):
    """The rest of the call is not wanted."""


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class Workers:
    """Threads that wait for calls: one that is done serves the next call, as each has a team of OpenMP's own."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._is_stopped = False

    def run(self, task: Callable[[], None]) -> None:
        """Let a thread run ``task``, which must not raise."""
        self._is_stopped = False
        if self._idle:
            self._idle.pop().put(task)
            return
        inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        inbox.put(task)
        threading.Thread(target=self._serve, args=(inbox,), name="retime-pipeline", daemon=True).start()

    def stop(self) -> None:
        """Let the threads end, those at work behind their task."""
        self._is_stopped = True
        with suppress(IndexError):  # threads take themselves from the list too
            while True:
                self._idle.pop().put(None)

    def _serve(self, inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := inbox.get()) is not None:
            task()
            del task
            self._idle.append(inbox)
            if self._is_stopped:  # before this thread was idle, as a task tells of its end before it returns
                with suppress(ValueError):  # it has been told, or has the next task
                    self._idle.remove(inbox)
                    return


class SuspendedCall:
    """A call that has not begun yet.

    Args:
        call: without arguments.
        workers: one of which runs it.
        seed: of what it draws in front of the layers; each layer behind the first has one of its own, so that numbers
            do not depend on where the model is cut.

    Attributes:
        leaves: what received tensors are inside of the call, from the last edge on.
        received: by layer and place in its arguments, those that a checkpoint around the layer computes from again.
    """

    def __init__(self, call: Callable[[], Any], workers: Workers, seed: int) -> None:
        self.leaves: list[Tensor] = []
        self.received: dict[int, dict[int, Tensor]] = {}
        self.seed = seed
        self._call: Callable[[], Any] | None = call
        self._workers = workers
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self._modes: list[Any] = [torch.autocast(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        self._modes += [device] if (device := torch.get_default_device()).type != "cpu" else []
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._wants_end = False

    def resume(self, value: Any = None) -> Any:
        """Run until the call stops, and return what it stopped with, or :class:`Returned`.

        Args:
            value: what :meth:`stop` returns inside of the call.

        Raises:
            BaseException: the call's own.
        """
        outer = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            if self._call is not None:
                self._workers.run(self._run)
            else:
                self._inbox.put(value)
            answer = self._outbox.get()
        finally:
            self._dtype = torch.get_default_dtype()
            torch.set_default_dtype(outer)
        if isinstance(answer, _Failed):
            raise answer.error
        return answer

    def stop(self, value: Any) -> Any:
        """Inside of the call: hand ``value`` to :meth:`resume`, and wait for the next one's.

        Raises:
            _Closed: the rest is not wanted, also where a ``finally`` block stops again.
        """
        if self._wants_end:
            raise _Closed
        self._outbox.put(value)
        answer = self._inbox.get()
        if self._wants_end:
            raise _Closed
        return answer

    def close(self) -> None:
        """The rest is not wanted: the call ends where it stands, with its ``finally`` blocks."""
        if self._wants_end or self._call is not None:
            return
        self._wants_end = True
        self._inbox.put(None)
        self._outbox.get()

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        HERE.call = self
        answer: Any
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            with torch.set_grad_enabled(self._grad), ExitStack() as modes:
                for mode in self._modes:
                    modes.enter_context(mode)
                answer = Returned(call())
        except BaseException as error:
            answer = _Failed(error)
        del call
        HERE.call = None
        self._wants_end = True
        self._outbox.put(answer)


def draw_for(layer: int, seed: int) -> None:
    """A layer begins in a call with this seed; the first one draws what it draws without a pipeline."""
    if layer:
        seed_torch((seed + _OTHER_NUMBERS * layer) % 2**63)
