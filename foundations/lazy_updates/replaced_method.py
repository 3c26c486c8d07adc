"""Replace one method of one optimizer object, and put it back."""

import functools
import types
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


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
