"""Which backward passes are fused: those that belong to a step, while gradients of the others only add up."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class Arming:
    """A switch, and a condition of the loop's own.

    Args:
        armed: whether the switch is on.

    Attributes:
        armed: whether the switch is on now.
    """

    def __init__(self, *, armed: bool) -> None:
        self.armed = armed
        self._condition: Callable[[], bool] | None = None

    def only_when(self, condition: Callable[[], bool]) -> None:
        """Fuse a backward pass only where this holds, too: for loops that know which one belongs to a step."""
        self._condition = condition

    def fuses_now(self) -> bool:
        """Whether gradients that arrive now are used up at once."""
        return self.armed and (self._condition is None or self._condition())

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here only add to ``.grad``; the first one outside updates."""
        before, self.armed = self.armed, False
        try:
            yield
        finally:
            self.armed = before

    def arm(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, with fusion on while it runs."""

        def armed_closure() -> Any:
            self.armed = True
            try:
                return closure()
            finally:
                self.armed = False

        return armed_closure
