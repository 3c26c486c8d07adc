"""One parameter under backward fusion: how often its gradient arrives in a step, and where the step stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from retime.mechanisms.fusion.consumed import ConsumedGradient

if TYPE_CHECKING:
    from retime.mechanisms.fusion.backward import BackwardFusion


class Followed:
    """One parameter: how often its hook fires in a step, and where the step stands."""

    __slots__ = (
        "alive_bytes",
        "fired",
        "fusion",
        "guard",
        "handle",
        "held_back",
        "parameter",
        "used",
        "uses",
        "version",
    )

    def __init__(self, fusion: BackwardFusion, parameter: Tensor) -> None:
        self.fusion = fusion
        self.parameter = parameter
        self.uses = fusion.backward_passes or 0
        """Firings in a step, ``theta.count`` of algorithm 3; 0 until a step has been counted."""
        self.fired = 0
        self.used = False
        """Whether this step's gradient has been used up."""
        self.version = 0
        """Autograd's count of in-place changes of the parameter, right after the update."""
        self.alive_bytes = 0
        self.held_back = False
        self.guard = ConsumedGradient(parameter)
        self.handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self._fire
        )

    def _fire(self, parameter: Tensor) -> None:
        self.fusion.on_gradient(self)

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
            zeros, self.guard = self.guard.sparse_zeros, ConsumedGradient(self.parameter)
            self.guard.sparse_zeros = zeros
            self.parameter.grad = self.guard

    def close(self) -> None:
        """Forget the step."""
        self.fired, self.used, self.alive_bytes = 0, False, 0
