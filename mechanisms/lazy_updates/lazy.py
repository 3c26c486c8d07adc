"""The lazy-update engine: a parameter is brought up to date by whoever reads it first.

Forward fusion (Jiang et al. 2021, algorithm 2) runs an update just before the next forward pass needs the parameter.
Hooks on modules would miss direct reads (``layer.weight``, a tied embedding, an EMA that kept a list of parameters). So
the parameter itself watches: while an update is pending its class is :class:`PendingParameter`, whose
``__torch_function__`` runs the update when any torch function reads it, then hands back the plain class. Up-to-date
parameters cost nothing.

What torch functions cannot see are reads that bypass Python: an alias made earlier (``p.data``, a view, an array),
compiled or scripted code, a C extension that takes the tensor directly, a replayed CUDA graph. ``readers.py`` finds
such parameters and keeps them out, or brings them up to date by a module hook; before replaying a graph of your own,
call ``flush()``.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retime.mechanisms.torch_private import reads_of_hooks, without_subclass_functions, without_torch_functions

_get, _set = "__get__", "__set__"
_KEEPS_PENDING: frozenset[Any] = frozenset(
    [
        getattr(getattr(Tensor, name), access)
        for name in ("grad", "requires_grad")
        for access in (_get, _set)
    ]
    + [
        getattr(getattr(Tensor, name), _get)
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "is_cuda", "is_sparse",
                     "is_meta", "is_quantized", "itemsize", "nbytes")
    ]
    + list(reads_of_hooks)
    + [
        getattr(Tensor, name)
        for name in ("size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous",
                     "is_floating_point", "is_complex", "get_device", "requires_grad_", "register_hook",
                     "register_post_accumulate_grad_hook", "__len__")
    ]
)  # fmt: skip
"""Torch functions that look at a parameter's form, or whether it has a gradient, not at its values."""
_READ_GRADIENT = getattr(Tensor.grad, _get)


class PendingUpdate:
    """One bucket of parameters whose update has not run yet.

    ``apply`` brings exactly these parameters up to date; whoever builds the update may make it wait first, for instance
    for the all-reduce of this bucket.
    """

    def __init__(self, parameters: list[Tensor], apply: Callable[[], None]) -> None:
        for parameter in parameters:
            earlier = getattr(parameter, "_retime_pending", None)
            if earlier is not None:
                earlier.settle()
        self.parameters = parameters
        self._default_dtype = torch.get_default_dtype()
        self._apply: Callable[[], None] | None = apply
        for parameter in parameters:
            parameter._retime_pending = self  # type: ignore[attr-defined]
            parameter.__class__ = _pending_class[type(parameter)]

    def settle(self) -> None:
        """Run the update if it has not run yet."""
        apply, self._apply = self._apply, None
        if apply is None:
            return
        self._unwatch()
        if self._is_usual():
            with without_torch_functions():
                apply()
        else:
            with _surroundings_of_a_step(self.parameters[0].device.type, self._default_dtype):
                apply()

    def release(self) -> None:
        """Take the watch off without running the update, for somebody who takes it over."""
        if self._apply is not None:
            self._apply = None
            self._unwatch()

    def _unwatch(self) -> None:
        for parameter in self.parameters:
            parameter.__class__ = _plain_class[type(parameter)]
            del parameter._retime_pending  # type: ignore[attr-defined]

    def _is_usual(self) -> bool:
        """Whether a step could run here and now as it stands; the long way round costs as much as a small update."""
        return not (
            torch.is_inference_mode_enabled()
            or torch.is_autocast_enabled(self.parameters[0].device.type)
            or torch.get_default_dtype() != self._default_dtype
        )


@contextlib.contextmanager
def _surroundings_of_a_step(device_type: str, default_dtype: torch.dtype) -> Iterator[None]:
    """The reader may be under inference mode or autocast or change the default dtype; ``optimizer.step()`` did not."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)  # new state takes it
    try:
        # state created in inference mode could never be updated in place again
        with torch.inference_mode(False), torch.autocast(device_type, enabled=False), without_torch_functions():
            yield
    finally:
        torch.set_default_dtype(before)


def can_wait(parameter: Tensor) -> bool:
    """Whether this tensor's class can watch reads: plain parameters and tensors, no subclass of somebody's own."""
    return type(parameter) in _pending_class


def is_pending(parameter: Tensor) -> bool:
    """Whether an update of this parameter has not run yet."""
    return type(parameter) in _plain_class


def pending_of(parameter: Tensor) -> PendingUpdate | None:
    """What waits for the next read of this parameter, if anything."""
    found: PendingUpdate | None = parameter._retime_pending if is_pending(parameter) else None  # type: ignore[attr-defined]
    return found


def gradient_of(parameter: Tensor) -> Tensor | None:
    """``parameter.grad`` without counting as a read, which would run what is pending."""
    if not is_pending(parameter):
        return parameter.grad
    with without_subclass_functions():
        return parameter.grad


def settle_all(parameters: Iterable[Tensor]) -> None:
    """Bring all of these up to date."""
    for parameter in parameters:
        if is_pending(parameter):
            parameter._retime_pending.settle()  # type: ignore[attr-defined]


def _settle_arguments(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            if is_pending(value):
                value._retime_pending.settle()  # type: ignore[attr-defined]
        elif isinstance(value, list | tuple):
            _settle_arguments(value)
        elif isinstance(value, dict):
            _settle_arguments(value.values())


class _Watching:
    """What the pending classes share."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KEEPS_PENDING:
            with without_subclass_functions():
                result = func(*args, **kwargs)
            if func != _READ_GRADIENT or result is None:
                return result
            # the gradient itself may be changed now, through .data even unseen, and the update still needs it
        _settle_arguments(args)
        if kwargs:
            _settle_arguments(kwargs.values())
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self._retime_pending.settle()  # type: ignore[attr-defined]
        return self.__deepcopy__(memo)  # the class is the plain one again

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._retime_pending.settle()  # type: ignore[attr-defined]
        return self.__reduce_ex__(protocol)


class PendingParameter(_Watching, nn.Parameter):
    """A Parameter with a pending update; never constructed, only the class of a live parameter for a while."""


class PendingTensor(_Watching, Tensor):
    """The same for plain tensors that an optimizer updates."""


_pending_class: dict[type[Tensor], Any] = {nn.Parameter: PendingParameter, Tensor: PendingTensor}
_plain_class: dict[type[Tensor], Any] = {pending: plain for plain, pending in _pending_class.items()}
