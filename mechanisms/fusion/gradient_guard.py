"""What stands in ``parameter.grad`` after backward fusion has used a gradient up.

Were it None, ``clip_grad_norm_``, a GradScaler or a gradient logger would silently see nothing. This tensor has the
parameter's shape, owns no memory, and raises on every read, saying what to change. Zeroing it, as
``zero_grad(set_to_none=False)`` does, puts ordinary zeros in its place.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private import FOREACH_ZERO, TO_COPY, disabled_torch_function, make_wrapper_subclass

_MESSAGE = (
    "this gradient was consumed by backward fusion: the update already ran inside backward(). "
    "{reader} needs gradients after the backward pass: use mode='forward' (exact with global-norm clipping, GradScaler "
    "and gradient logging), or clip_value=... for clipping by value. If this was raised inside backward(): the "
    "gradients of the step before were never cleared (call optimizer.zero_grad()), or more backward passes ran before "
    "optimizer.step() than in the steps before (wrap all but the last in `with fusion.accumulate():`), or no "
    "optimizer.step() followed an earlier one (use mode='forward')."
)
_aten = torch.ops.aten
_ZEROING = (_aten.zero_.default, FOREACH_ZERO)
_MOVING = (_aten.detach.default, _aten.alias.default, TO_COPY, _aten.detach_.default)


class GradientGuard(Tensor):
    """Stands for a gradient that was used up: the parameter's shape, dtype and device, and no bytes behind it."""

    sparse_zeros: Tensor | None
    """Zeros of a sparse gradient's layout; None: the gradient was dense."""
    _parameter: weakref.ref[Tensor] | None

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
        made = make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype or like.dtype, device=device or like.device
        )
        made.sparse_zeros = None
        made._parameter = like._parameter if isinstance(like, cls) else weakref.ref(like)
        return made

    def __init__(self, like: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None: ...

    def __deepcopy__(self, memo: Any) -> "GradientGuard":
        """Of a tensor's copy: every read of it raises too."""
        made = GradientGuard(self)
        made._parameter = None
        memo[id(self)] = made
        return made

    def _zero(self) -> None:
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None or not isinstance(parameter.grad, GradientGuard):
            raise RuntimeError(_MESSAGE.format(reader="`zero_` of a copy"))
        parameter.grad = torch.zeros_like(parameter) if self.sparse_zeros is None else self.sparse_zeros.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientGuard(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if func in _ZEROING:
            for tensor in first if isinstance(first, list | tuple) else (first,):
                if isinstance(tensor, cls):
                    tensor._zero()
                else:
                    tensor.zero_()
            return first if func is _aten.zero_.default else None
        if func in _MOVING and isinstance(first, cls):
            return cls(first, device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        raise RuntimeError(_MESSAGE.format(reader=f"`{func.name()}`"))
