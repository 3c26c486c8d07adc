"""Fake tensors that are of use in dry runs alone: one that a step has left in a variable is told from a real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from retime.foundations.torch_private import FakeTensorMode

__all__ = ["DryMode", "LeftBehindError"]


class LeftBehindError(RuntimeError):
    """A step goes on with a tensor that a dry run of it has left behind, which has no values."""


class DryMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors, which can be computed with until :meth:`open` has ended, and in it again.

    What modules hold comes back after a dry run. A global variable or an attribute of some other object that a step
    binds anew, or a list there that it appends to, does not; a fake tensor there would make losses fake, and training
    would go on without a gradient.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._over = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around all that a dry run does; afterwards whatever computes on a tensor of it raises LeftBehindError."""
        self._over = False
        try:
            yield
        finally:
            self._over = True

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if self._over:
            raise LeftBehindError(
                f"{func.name()} is given a tensor without values, which a dry run of the step has left in a variable "
                "that is no part of the model: a global one, or an attribute of some other object. Keep it in an "
                "attribute of the model, which planning puts back, write into one tensor in place, or give "
                "dry_run='off', which never calls the step more often than training does"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)
