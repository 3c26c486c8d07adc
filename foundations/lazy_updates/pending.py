"""The lazy-update engine: a parameter is brought up to date by whoever reads it first.

Forward fusion (Jiang et al. 2021, algorithm 2) runs an update just before the next forward pass needs the parameter.
Hooks on modules would miss direct reads (``layer.weight``, a tied embedding, an EMA that kept a list of parameters). So
the parameter itself watches: while an update is pending its class is :class:`PendingParameter`, whose
``__torch_function__`` runs the update when any torch function reads it, then hands back the plain class. Up-to-date
parameters cost nothing. While the update runs, the parameter goes on watching: a read in another thread waits for its
end, and the update's own reads go past the watch.

What torch functions cannot see are reads that bypass Python: an alias made earlier (``p.data``, a view, an array),
compiled or scripted code, a C extension that takes the tensor directly, a replayed CUDA graph. The last section finds
such parameters and keeps them out, or brings them up to date by a module hook; before replaying a graph of your own,
call ``flush()``.
"""

import contextlib
import copy
import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from retime.foundations.lazy_updates.optimizers import FusedAdam, is_declared, raw_step
from retime.foundations.messages import parse_bytes
from retime.foundations.torch_private.engine import has_compile_mark
from retime.foundations.torch_private.nn_and_optim import SCRIPTED, foreach_classes
from retime.foundations.torch_private.tensors import (
    reads_of_hooks,
    sparse_indices,
    sparse_values,
    storage_address,
    storage_use_count,
    version_of,
    without_subclass_functions,
    without_torch_functions,
)

# Step the user's own optimizer for some of its parameters.
#
# One optimizer object a parameter (the usual recipe) leaves the user's optimizer without state, and loses the
# multi-tensor kernels. Here a *window* shares the optimizer's state and hyper-parameters and shows its ``step`` only
# the parameters of one bucket. The user's object is never touched, so a failure or a second thread finds it whole.


class PartialOptimizer:
    """A view of ``optimizer`` that can step a part of its parameters.

    With ``snapshot=True`` hyper-parameters are copied (tensor ones cloned, also ``grad_scale`` and ``found_inf`` which
    a GradScaler hangs on the optimizer), so later changes by a scheduler or the scaler do not reach this window.

    What a declared optimizer writes into its groups, such as a count of steps, is forgotten after each part: the
    optimizer's own ``step``, once for all groups, is what counts.
    """

    def __init__(self, optimizer: Optimizer, *, snapshot: bool = False) -> None:
        self._step = raw_step(optimizer)
        window = object.__new__(type(optimizer))
        window.__dict__.update(optimizer.__dict__)
        window.__dict__.pop("step", None)
        window.__dict__.pop("zero_grad", None)
        self._window = window
        self._groups: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        if snapshot:
            self._groups = [_copied_group(group) for group in self._groups]
            for name in ("grad_scale", "found_inf"):
                if name in window.__dict__:
                    window.__dict__[name] = _copied(window.__dict__[name])
        self._versions = [_versions_of(group) for group in self._groups]
        self._writes_groups = is_declared(optimizer)
        self._kernels = [
            FusedAdam.of(window, self._step, group) if group.get("fused") else None for group in self._groups
        ]
        self.group_of = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        """The number of each parameter's group, by the parameter's identity."""

    def update(self, parameters: Sequence[Tensor]) -> None:
        """Step these parameters, from their ``.grad``, with the kernels the optimizer would use for all of them."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._update(parameters)
        else:  # inside a backward pass
            self._update(parameters)

    def _update(self, parameters: Sequence[Tensor]) -> None:
        if self._by_kernel(parameters):
            return
        members: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            members.setdefault(self.group_of[id(parameter)], []).append(parameter)
        groups = self._groups
        if self._writes_groups:
            groups = [_copied_group(group) for group in groups]
        self._window.param_groups = [{**groups[index], "params": members[index]} for index in sorted(members)]
        device = parameters[0].device.type
        if torch.is_autocast_enabled(device):  # the caller's, around its backward pass
            with torch.autocast(device, enabled=False):
                self._step(self._window)
        else:
            self._step(self._window)

    def _by_kernel(self, parameters: Sequence[Tensor]) -> bool:
        group = self.group_of[id(parameters[0])]
        kernel = self._kernels[group]
        if kernel is None or any(self.group_of[id(parameter)] != group for parameter in parameters):
            return False
        return kernel.update(parameters)

    def is_outdated(self, optimizer: Optimizer) -> bool:
        """Return whether hyper-parameters of the groups seen here were changed since."""
        if self._versions != [_versions_of(group) for group in self._groups]:
            return True
        for mine, group in zip(self._groups, optimizer.param_groups, strict=False):
            for key, value in mine.items():
                now = group.get(key)
                if now is not value and (isinstance(value, Tensor) or isinstance(now, Tensor) or now != value):
                    return True
        return False


def _versions_of(group: dict[str, Any]) -> list[int]:
    """Return how often tensors among hyper-parameters have been written into, as schedulers do with ``lr``."""
    values = (one for value in group.values() for one in (value if isinstance(value, tuple) else (value,)))
    return [version_of(one) for one in values if isinstance(one, Tensor)]


def _copied_group(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) for key, value in group.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_copied(v) for v in value)
    return value


def nbytes(tensor: Tensor) -> int:
    """Bytes that ``tensor`` occupies (values and indices of a sparse one)."""
    if tensor.layout is torch.sparse_coo:
        return nbytes(sparse_values(tensor)) + nbytes(sparse_indices(tensor))
    return tensor.nbytes


# How many bytes are gathered before one multi-tensor update.

CPU_BUCKET_BYTES = 1 << 20
CUDA_BUCKET_BYTES = 8 << 20


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of the optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def default_bucket_bytes(parameters: Iterable[Tensor]) -> int:
    """Bucket size when the user names none: enough to keep the kernels busy, little enough to stay in the caches.

    A small model gets at least four buckets, or nothing would be left to fuse.
    """
    everything = list(parameters)
    most = CUDA_BUCKET_BYTES if any(parameter.is_cuda for parameter in everything) else CPU_BUCKET_BYTES
    return max(1, min(most, sum(map(nbytes, everything)) // 4))


def check_bucket_bytes(bucket_bytes: int | str | None) -> int | None:
    """The bytes that the argument asks for; None for the default."""
    return None if bucket_bytes is None else parse_bytes("bucket_bytes", bucket_bytes, examples="'1MiB', or None")


# The optimizer's state while updates are pending: whoever looks into it finds them done.


class WatchedState(defaultdict[Any, Any]):
    """``optimizer.state`` that runs pending updates before anything but those updates reads or changes it."""

    def __init__(self, flush: Callable[[], None], content: dict[Any, Any]) -> None:
        super().__init__(dict, content)
        self._flush = flush
        self._turn = threading.RLock()
        self._updating: int | None = None
        """The thread in which an update runs."""

    @contextlib.contextmanager
    def update_runs(self) -> Iterator[None]:
        """An update reads and writes the state in here, in this thread; updates in others come one after the other."""
        with self._turn:
            before, self._updating = self._updating, threading.get_ident()
            try:
                yield
            finally:
                self._updating = before

    def _settle(self) -> None:
        if self._updating != threading.get_ident():
            self._flush()

    def plain(self) -> defaultdict[Any, Any]:
        """The same entries without the watch."""
        self._settle()
        return defaultdict(dict, super().items())

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> Any:
        return self.plain().__reduce__()


def _settling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def settled(state: WatchedState, *args: Any, **kwargs: Any) -> Any:
        state._settle()
        return method(state, *args, **kwargs)

    return settled


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__", "__len__"),
    *("get", "keys", "values", "items", "pop", "clear", "update", "setdefault"),
):
    setattr(WatchedState, _name, _settling(getattr(defaultdict, _name)))


def watch(optimizer: Optimizer, flush: Callable[[], None]) -> WatchedState:
    """Put a watch on the optimizer's state, which loading a checkpoint takes off, and return it."""
    state = optimizer.state
    if not isinstance(state, WatchedState):
        state = optimizer.state = WatchedState(flush, state)
    return state


def unwatch(optimizer: Optimizer) -> None:
    """Give the optimizer a plain state with the same entries."""
    if isinstance(optimizer.state, WatchedState):
        optimizer.state = optimizer.state.plain()


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
        parameters: none that is :func:`unwatchable`.
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
        """Lock of the thread that applies the update; it may enter again, as the update reads parameters."""
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
        """Return whether a step could run here and now as it is; the long way round costs as much as a small update."""
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


def is_pending(parameter: Tensor) -> bool:
    """Return whether an update of this parameter has not run yet."""
    return type(parameter) in _plain_class


def pending_of(parameter: Tensor) -> PendingUpdate | None:
    """Update that waits for the next read of this parameter, if any."""
    # another thread may settle it between two looks
    update: PendingUpdate | None = getattr(parameter, "_retime_pending", None) if is_pending(parameter) else None
    return update


def gradient_of(parameter: Tensor) -> Tensor | None:
    """``parameter.grad`` without counting as a read, which would run what is pending."""
    if not is_pending(parameter):
        return parameter.grad
    with without_subclass_functions():
        return parameter.grad


def apply_pending(parameters: Iterable[Tensor]) -> None:
    """Run the updates of these parameters that have not run yet."""
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
    """Base that the pending classes share."""

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

    def as_subclass(self, cls: type[Any]) -> Any:
        _settle_arguments((self,))
        return Tensor.as_subclass(self, cls)  # type: ignore[arg-type]

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

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Make a plain one, for code that makes another of a parameter's ``type``."""
        return nn.Parameter(data, requires_grad)


class PendingTensor(_Watching, Tensor):
    """The same for plain tensors that an optimizer updates."""


_pending_class: dict[type[Tensor], Any] = {nn.Parameter: PendingParameter, Tensor: PendingTensor}
_plain_class: dict[type[Tensor], Any] = {pending: plain for plain, pending in _pending_class.items()}
foreach_classes.extend(_plain_class)


# Code that reads parameters where no torch function sees it, and what forward fusion does about each kind.

_PICKS_A_KERNEL_BY_CLASS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""They ask ``has_torch_function`` of their weights and would choose another kernel while updates are pending."""


def unwatchable_parameters(model: nn.Module) -> set[Tensor]:
    """Parameters under compiled or scripted modules: their code reads memory directly, so their updates cannot wait."""
    parameters: set[Tensor] = set()
    for module in model.modules():
        if is_compiled(module):
            parameters.update(module.parameters())
    return parameters


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module's forward is compiled or scripted."""
    return has_compile_mark(module) or isinstance(module, torch.jit.ScriptModule)


def aliased(parameters: Iterable[Tensor]) -> set[Tensor]:
    """Return those that share their memory with something else: ``p.data``, a view or a NumPy array made earlier.

    A read through the alias could not be seen. The parameter and the handle used for counting hold the storage twice.
    """
    shared: set[Tensor] = set()
    for parameter in parameters:
        with without_subclass_functions():  # not a read
            storage = parameter.untyped_storage()
        if storage_use_count(storage_address(storage)) > 2 or (storage.device.type == "cpu" and storage.is_shared()):
            shared.add(parameter)
    return shared


def unwatchable(parameters: Iterable[Tensor]) -> set[Tensor]:
    """Return those whose reads cannot be seen: of a class of somebody's own, or aliased."""
    parameters = list(parameters)
    others = {p for p in parameters if type(p) not in _pending_class and type(p) not in _plain_class}
    return others | aliased(p for p in parameters if p not in others)


class OpaqueCalls:
    """While one of these is held, calls that no torch function sees bring their arguments up to date first.

    They are those of scripted functions and methods, and ``nn.Parameter(p)``, which asks for the class of ``p``.
    """

    _held = 0
    _plain: ClassVar[list[tuple[Any, str, Any]]] = []

    def __init__(self) -> None:
        if not OpaqueCalls._held:
            names = [*((one, "__call__") for one in SCRIPTED), (nn.Parameter, "__new__")]
            OpaqueCalls._plain = [(owner, name, vars(owner)[name]) for owner, name in names]
            for owner, name in names:
                first = _settling_arguments(getattr(owner, name))
                setattr(owner, name, staticmethod(first) if name == "__new__" else first)
        OpaqueCalls._held += 1
        self.remove = weakref.finalize(self, OpaqueCalls._let_go)

    @staticmethod
    def _let_go() -> None:
        OpaqueCalls._held -= 1
        if not OpaqueCalls._held:
            for owner, name, plain in OpaqueCalls._plain:
                setattr(owner, name, plain)


def _settling_arguments(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        _settle_arguments((args, kwargs))
        return plain(*args, **kwargs)

    return call


def flush_before_opaque_forward(model: nn.Module) -> list[RemovableHandle]:
    """Hook the modules whose forward may hand parameters to code that no torch function sees; returns the handles.

    torch's own layers need no hook. Somebody else's class may call a C extension with its parameters; a module with a
    ``forward`` of its own on the instance (graphed or wrapped callables) may read its whole subtree.
    """
    handles = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no Python hook; its parameters never wait
        whole = isinstance(module, _PICKS_A_KERNEL_BY_CLASS) or "forward" in module.__dict__
        own = next(module.parameters(recurse=False), None) is not None
        foreign = not type(module).__module__.startswith("torch.nn.")
        if whole or (own and foreign):
            handles.append(module.register_forward_pre_hook(_Settle(recurse=whole), prepend=True))
    return handles


class _Settle:
    """A pre-hook that brings a module's parameters up to date; a class, so that the model can still be pickled."""

    def __init__(self, *, recurse: bool) -> None:
        self._recurse = recurse

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        apply_pending(module.parameters(recurse=self._recurse))
