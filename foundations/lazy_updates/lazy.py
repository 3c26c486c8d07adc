"""The lazy-update engine: a parameter is brought up to date by whoever reads it first.

Forward fusion (Jiang et al. 2021, algorithm 2) runs an update just before the next forward pass needs the parameter.
Hooks on modules would miss direct reads (``layer.weight``, a tied embedding, an EMA that kept a list of parameters). So
the parameter itself watches: while an update is pending its class is :class:`PendingParameter`, whose
``__torch_function__`` runs the update when any torch function reads it, then hands back the plain class. Up-to-date
parameters cost nothing. While the update runs, the parameter goes on watching: a read in another thread waits for its
end, and the update's own reads go past the watch.

What torch functions cannot see are reads that bypass Python: an alias made earlier (``p.data``, a view, an array),
compiled or scripted code, a C extension that takes the tensor directly, a replayed CUDA graph. ``readers.py`` finds
such parameters and keeps them out, or brings them up to date by a module hook; before replaying a graph of your own,
call ``flush()``.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.torch_private import (
    foreach_classes,
    reads_of_hooks,
    without_subclass_functions,
    without_torch_functions,
)

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
    """One bucket of parameters whose update has not run yet, or runs.

    Args:
        parameters: each of a class that :func:`can_wait`, or pending already.
        apply: brings exactly these parameters up to date. Whoever builds the update may make it wait first, for
            instance for the all-reduce of this bucket.
    """

    def __init__(self, parameters: list[Tensor], apply: Callable[[], None]) -> None:
        for parameter in parameters:
            earlier = getattr(parameter, "_retime_pending", None)
            if earlier is not None:
                earlier.settle()
        self.parameters = parameters
        self._default_dtype = torch.get_default_dtype()
        self._apply: Callable[[], None] | None = apply
        self._turn = threading.RLock()
        """Of the thread that settles; it may enter again, as the update reads parameters."""
        self._runs = False
        for parameter in parameters:
            parameter._retime_pending = self  # type: ignore[attr-defined]
            parameter.__class__ = _pending_class[type(parameter)]

    def settle(self) -> bool:
        """Run the update if it has not run yet; another thread that runs it is waited for.

        Returns:
            Whether it has run; False: this is called inside of the update itself.
        """
        with self._turn:
            apply, self._apply = self._apply, None
            if apply is None:
                return not self._runs
            self._runs = True
            try:
                self._run(apply)
            finally:
                self._runs = False
                self._unwatch()
            return True

    def _run(self, apply: Callable[[], None]) -> None:
        if self._is_usual():
            with without_torch_functions():
                apply()
        else:
            with _surroundings_of_a_step(self.parameters[0].device.type, self._default_dtype):
                apply()

    def release(self) -> None:
        """Take the watch off without running the update, for somebody who takes it over."""
        with self._turn:
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
    # another thread may settle it between two looks
    found: PendingUpdate | None = getattr(parameter, "_retime_pending", None) if is_pending(parameter) else None
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
        _settled(parameter)


def _settled(parameter: Tensor) -> bool:
    """Bring one up to date; returns whether it is now: not inside of its own update."""
    while (pending := pending_of(parameter)) is not None:
        if not pending.settle():
            return False
    return True


def _settle_arguments(values: Iterable[Any]) -> bool:
    """Bring all parameters in there up to date; returns whether they are now."""
    settled = True
    for value in values:
        if isinstance(value, Tensor):
            settled &= _settled(value)
        elif isinstance(value, list | tuple):
            settled &= _settle_arguments(value)
        elif isinstance(value, dict):
            settled &= _settle_arguments(value.values())
    return settled


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
        if _settle_arguments((args, kwargs)):
            return func(*args, **kwargs)
        with without_subclass_functions():  # the update reads what it brings up to date
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        with _in_plain_class(self):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _in_plain_class(self):
            return self.__reduce_ex__(protocol)


@contextlib.contextmanager
def _in_plain_class(parameter: Any) -> Iterator[None]:
    """Bring a parameter up to date that is about to be copied; inside of its own update it is copied as it stands."""
    if _settled(parameter):
        yield
        return
    pending, parameter.__class__ = type(parameter), _plain_class[type(parameter)]
    try:
        yield
    finally:
        parameter.__class__ = pending


class PendingParameter(_Watching, nn.Parameter):
    """A Parameter with a pending update; never constructed, only the class of a live parameter for a while."""


class PendingTensor(_Watching, Tensor):
    """The same for plain tensors that an optimizer updates."""


_pending_class: dict[type[Tensor], Any] = {nn.Parameter: PendingParameter, Tensor: PendingTensor}
_plain_class: dict[type[Tensor], Any] = {pending: plain for plain, pending in _pending_class.items()}
foreach_classes.extend(_plain_class)
