"""``optimizer.step()`` of a hand-written loop, which updates what the backward pass left over."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from retime.foundations.lazy_updates import ReplacedMethod


class OwnStep:
    """The optimizer's ``step``, with a call in front of it and one behind.

    Args:
        optimizer: whose method it is.
        begin: called behind the closure, if there is one.
        end: called when the optimizer's own ``step`` has returned.
    """

    def __init__(self, optimizer: Optimizer, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._method = ReplacedMethod(optimizer, "step", self._step)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        self._method.inner()
        self._end()
        return loss

    def restore(self) -> None:
        """Put the former method back."""
        self._method.restore()
