"""One parameter under backward fusion: how often its gradient arrives in a step, and where the step stands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from retime.mechanisms.fusion.gradient_guard import GradientGuard


class Followed:
    """One parameter: how often its hook fires in a step, and where the step stands.

    Args:
        parameter: it gets a hook, which ``handle`` takes off.
        uses: firings in a step, if that is known; else 0.
        on_gradient: called with this behind each gradient that was added to ``.grad``.
    """

    __slots__ = (
        "_on_gradient",
        "alive_bytes",
        "fired",
        "guard",
        "handle",
        "parameter",
        "unfused",
        "used",
        "uses",
        "version",
    )

    def __init__(self, parameter: Tensor, uses: int, on_gradient: Callable[[Followed], None]) -> None:
        self._on_gradient = on_gradient
        self.parameter = parameter
        self.uses = uses
        """Firings in a step, ``theta.count`` of algorithm 3; 0 until a step has been counted."""
        self.fired = 0
        self.used = False
        """Whether this step's gradient has been used up."""
        self.version = 0
        """Autograd's count of in-place changes of the parameter, right after the update."""
        self.alive_bytes = 0
        self.unfused = False
        self.guard = GradientGuard(parameter)
        self.handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self._fire
        )

    def _fire(self, parameter: Tensor) -> None:
        self._on_gradient(self)

    def note_layout(self) -> None:
        """Before the gradient goes: ``zero_grad(set_to_none=False)`` keeps a sparse one sparse."""
        gradient = self.parameter.grad
        if gradient is not None and gradient.is_sparse:
            self.guard.sparse_zeros = torch.zeros_like(gradient)

    def put_guard(self) -> None:
        """Make every read of ``.grad`` raise."""
        try:
            self.parameter.grad = self.guard
        except (RuntimeError, TypeError):  # the parameter has another shape, dtype or device by now
            zeros, self.guard = self.guard.sparse_zeros, GradientGuard(self.parameter)
            self.guard.sparse_zeros = zeros
            self.parameter.grad = self.guard

    def close(self) -> None:
        """Forget the step."""
        self.fired, self.used, self.alive_bytes = 0, False, 0
