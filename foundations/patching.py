"""Other attributes for one object, for a while."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

# Replace one method of one optimizer object, and put it back.


class ReplacedMethod:
    """``optimizer.<name>`` becomes ``function(optimizer, ...)``; ``inner`` is what stood there before.

    The replacement is a method bound to the optimizer, because learning-rate schedulers wrap
    ``optimizer.step.__func__``, and looks like the method it replaces, marks of such wrappers included.
    """

    def __init__(self, optimizer: Optimizer, name: str, function: Callable[..., Any]) -> None:
        self._optimizer, self._name = optimizer, name
        self.inner: Callable[..., Any] = getattr(optimizer, name)
        self.active = True

        @functools.wraps(getattr(self.inner, "__func__", self.inner))
        def stand_in(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.active else self.inner(*args, **kwargs)

        stand_in._retime_fused = self  # type: ignore[attr-defined]
        self._stand_in = types.MethodType(stand_in, optimizer)
        setattr(optimizer, name, self._stand_in)

    def restore(self) -> None:
        """Put the former method back; where somebody wrapped ours meanwhile, ours only passes calls on."""
        if not self.active:
            return
        self.active = False
        if self._optimizer.__dict__.get(self._name) is not self._stand_in:
            return
        if getattr(self.inner, "__func__", None) is getattr(type(self._optimizer), self._name):
            delattr(self._optimizer, self._name)
        else:
            setattr(self._optimizer, self._name, self.inner)


@contextmanager
def replaced_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """While open, ``owner`` itself has these attributes, methods of its class included; then what it had before."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


class _Layer:
    """A method in front of another; when it is gone, that one alone."""

    def __init__(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        self._owner, self._name, self._method = owner, name, method
        self._own = vars(owner).get(name)
        self._inner = getattr(owner, name)
        vars(owner)[name] = self
        self._gone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._inner if self._gone else self._method)(*args, **kwargs)

    def take_out(self) -> None:
        self._gone = True
        own = vars(self._owner)
        while isinstance(top := own.get(self._name), _Layer) and top._gone:
            if top._own is None:
                del own[self._name]
            else:
                own[self._name] = top._own


@contextmanager
def layered_methods(owner: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """While open, ``owner`` has these methods in front of those it had, which they may call.

    Unlike with :func:`replaced_attributes`, several of these may be closed in any order.
    """
    layers = [_Layer(owner, name, method) for name, method in methods.items()]
    try:
        yield
    finally:
        for layer in layers:
            layer.take_out()
