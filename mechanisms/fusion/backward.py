"""Backward fusion: update parameters while the backward pass runs (Jiang et al. 2021, section 3, algorithm 3).

A parameter is updated once its gradient is complete and nothing needs its old value:

* Autograd adds up all uses of a parameter within one graph before its accumulation hook fires. What it cannot add up
  are several graphs: a second ``backward()`` before the step, or the nested backward of reentrant checkpointing. So the
  first step of every parameter runs the plain way while its firings are counted (``theta.count`` of algorithm 3),
  unless an adapter knows that there is one graph; later steps update it at the last one. Fewer firings leave it to
  ``optimizer.step()``; more raise an error.
* A node that still needs the old value (section B.2) either contributes to the gradient, and so ran before the hook; or
  saved an alias of the parameter, which is found and holds the update back; or saved the parameter itself, and
  autograd's version check raises. What cannot be seen is a checkpointed segment that will read, without a gradient, a
  parameter whose gradient is complete by then: use mode='forward' for such a model.

Updates go by *buckets* of gradients in order of arrival, so the optimizer's multi-tensor and fused kernels are kept,
and each bucket's gradients are freed at once. For the freed memory to be used again, nothing small may be allocated
between two gradients and outlive them: glibc's aligned allocations would not merge again, and every gradient would take
new pages (seen as 17,000 page faults a step). So all bookkeeping of a step lives in records made once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from retime.foundations.arguments import Above, AtLeast, checked
from retime.foundations.lazy_updates import (
    PartialOptimizer,
    ReplacedMethod,
    aliased,
    check_bucket_bytes,
    default_bucket_bytes,
    nbytes,
    parameters_of,
)
from retime.foundations.messages import warn_no_effect
from retime.foundations.patching import replaced_attributes
from retime.foundations.streams import SideStream
from retime.foundations.torch_private.engine import FOREACH_ZERO, TO_COPY
from retime.foundations.torch_private.nn_and_optim import foreach_clamp_max, foreach_clamp_min
from retime.foundations.torch_private.tensors import (
    disabled_torch_function,
    make_wrapper_subclass,
    post_accumulate_hooks,
    version_of,
)
from retime.mechanisms.fusion.report import FusionReport

# What stands in ``parameter.grad`` after backward fusion has used a gradient up.
#
# Were it None, ``clip_grad_norm_``, a GradScaler or a gradient logger would silently see nothing. This tensor has the
# parameter's shape, owns no memory, and raises on every read, saying what to change. Zeroing it, as
# ``zero_grad(set_to_none=False)`` does, puts ordinary zeros in its place.

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
        dtype = dtype or (None if isinstance(like, cls) else like.grad_dtype) or like.dtype
        guard = make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=device or like.device)
        guard.sparse_zeros = None
        guard._parameter = like._parameter if isinstance(like, cls) else weakref.ref(like)
        return guard

    def __init__(self, like: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None: ...

    def __deepcopy__(self, memo: Any) -> GradientGuard:
        """Return the guard of a tensor's copy: every read of it raises too."""
        guard = GradientGuard(self)
        guard._parameter = None
        memo[id(self)] = guard
        return guard

    def _zero(self) -> None:
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None or not isinstance(parameter.grad, GradientGuard):
            raise RuntimeError(_MESSAGE.format(reader="`zero_` of a copy"))
        dense = torch.zeros_like(parameter, dtype=self.dtype)
        parameter.grad = dense if self.sparse_zeros is None else self.sparse_zeros.clone()

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


# Clipping by value, gradient by gradient.


def clip_by_value(gradients: list[Tensor], clip_value: float) -> None:
    """Clamp in place, with the kernels that ``torch.nn.utils.clip_grad_value_`` uses on parameters."""
    if not gradients:
        return
    with torch.no_grad():
        foreach_clamp_min(gradients, -clip_value)
        foreach_clamp_max(gradients, clip_value)


# One parameter under backward fusion: how often its gradient arrives in a step, and where the step stands.


class FusedParameter:
    """One parameter: how often its hook fires in a step, and where the step stands.

    Args:
        parameter: it gets a hook, which ``handle`` takes off.
        uses: firings in a step, if that is known; else 0.
        on_gradient: called with this and the parameter behind each gradient that was added to ``.grad``.
    """

    __slots__ = ("fired", "guard", "handle", "live_bytes", "parameter", "unfused", "updated", "used", "uses")

    def __init__(self, parameter: Tensor, uses: int, on_gradient: Callable[[FusedParameter, Tensor], None]) -> None:
        self.parameter = parameter
        self.uses = uses
        """Firings in a step, ``theta.count`` of algorithm 3; 0 until a step has been counted."""
        self.fired = 0
        self.used = False
        """Whether this step's gradient has been used up."""
        self.updated = 0, 0
        """What :meth:`writes` was right after the update."""
        self.live_bytes = 0
        """Bytes of its gradient, as far as the hook can see."""
        self.unfused = False
        self.guard = GradientGuard(parameter)
        self.handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(on_gradient, self)
        )

    def writes(self) -> tuple[int, int]:
        """Return autograd's count of in-place changes of the parameter, and where its memory is (``.data =``)."""
        return version_of(self.parameter), self.parameter.data_ptr()

    def put_guard(self) -> None:
        """Make every read of ``.grad`` raise."""
        try:
            self.parameter.grad = self.guard
        except (RuntimeError, TypeError):  # the parameter has another shape, dtype or device by now
            zeros, self.guard = self.guard.sparse_zeros, GradientGuard(self.parameter)
            self.guard.sparse_zeros = zeros
            self.parameter.grad = self.guard


# Graphs with nodes that are written in Python, and may run a backward pass of their own.


def has_python_nodes(loss: Tensor) -> bool:
    """Check whether the graph behind ``loss`` has a node of a ``torch.autograd.Function``."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


# Steps that an update inside ``backward()`` would make another one: they end with an error that says what to do.


SECOND_DERIVATIVE = (
    "backward(create_graph=True) keeps the old parameters for a second derivative, backward fusion overwrites them: "
    "use mode='forward', or remove the fusion"
)


def refuse_more_gradients(followed: FusedParameter) -> None:
    """Called when one gradient more arrives than in the steps before.

    Raises:
        RuntimeError: the parameter is updated already, or will be before the step.
    """
    if followed.used or fusion_blockers([followed])[0] is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(followed.parameter.shape)} received {followed.fired} gradients in one step, "
            f"{followed.uses} in the steps before, and may be updated already. Wrap all backward passes of a step "
            "but the last in `with fusion.accumulate():`; with checkpointing, pass use_reentrant=False; a "
            "backward() that no optimizer.step() follows needs mode='forward'; after an exception inside a "
            "backward(), call `fusion.abandon_step()` and go on with the next batch"
        )


def refuse_changes(used: list[FusedParameter]) -> None:
    """Called by ``optimizer.step()``, with parameters whose gradients have been used up and stand under a guard.

    Raises:
        RuntimeError: a gradient or a parameter has been changed since.
    """
    if any(followed.parameter.grad is not followed.guard for followed in used):
        raise RuntimeError(
            "a gradient was cleared or replaced between backward() and optimizer.step(), but backward fusion has "
            "updated its parameter already: use mode='forward'"
        )
    if any(followed.writes() != followed.updated for followed in used):
        raise RuntimeError(
            "a parameter was changed in place between backward() and optimizer.step(), but backward fusion has "
            "updated it already: change it before backward() or after step(), or use mode='forward'"
        )


def refuse_new_hyper_parameters(window: PartialOptimizer, optimizer: Optimizer) -> None:
    """Called by ``optimizer.step()``, with the window through which parameters have been updated.

    Raises:
        RuntimeError: a hyper-parameter has been changed since.
    """
    if window.is_outdated(optimizer):
        raise RuntimeError(
            "a learning rate or another hyper-parameter was changed between backward() and optimizer.step(), but "
            "backward fusion has updated parameters already: change it before backward(), or use mode='forward'"
        )


# Why an update waits for ``optimizer.step()``, although its gradient is complete.

OTHER_HOOKS = (
    "with post-accumulate-grad hooks of others, which would find the gradient freed; remove the hooks, or use "
    "mode='forward'"
)
ALIASED = (
    "that share memory with another tensor or array (.data, .detach(), .numpy()), since backward may still need the "
    "old values through it and no version check would notice; delete it to fuse them"
)


def fusion_blockers(bucket: list[FusedParameter]) -> list[str | None]:
    """Return what keeps each of these parameters from being updated inside of the backward pass, if anything does."""
    shared = aliased([followed.parameter for followed in bucket])
    blockers: list[str | None] = []
    for followed in bucket:
        hooks = post_accumulate_hooks(followed.parameter)
        if hooks is not None and len(hooks) > 1:
            blockers.append(OTHER_HOOKS)
        else:
            blockers.append(ALIASED if followed.parameter in shared else None)
    return blockers


class BackwardFusion:
    """Updates the optimizer's parameters inside ``backward()``; see :func:`retime.mechanisms.fusion.fuse_optimizer`.

    Args:
        optimizer: its parameters' hooks are taken until :meth:`remove`.
        bucket_bytes: of gradients gathered before one multi-tensor update, or a text such as ``"4MiB"``; None: by the
            parameters' size and device.
        clip_value: clamps every gradient element to [-clip_value, clip_value] first, as
            ``torch.nn.utils.clip_grad_value_`` does.
        side_stream: on CUDA: updates on a stream of their own.
        backward_passes: in each step; None: the first step counts them.
        armed: whether gradients are used up as they come. A bare loop leaves it on; an adapter switches it on for the
            one backward pass that belongs to a step.
    """

    @checked
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        bucket_bytes: int | str | None = None,
        clip_value: Annotated[float, Above(0)] | None = None,
        side_stream: bool = False,
        backward_passes: Annotated[int, AtLeast(1)] | None = None,
        armed: bool = True,
    ) -> None:
        self.armed = armed
        self.optimizer = optimizer
        self.backward_passes = backward_passes
        self.clip_value = clip_value
        self.bucket_bytes = check_bucket_bytes(bucket_bytes) or default_bucket_bytes(parameters_of(optimizer))
        self._side = SideStream() if side_stream else None
        self._condition: Callable[[], bool] | None = None
        self._report = FusionReport(mode="backward")
        self._followed: dict[Tensor, FusedParameter] = {}
        self._live_bytes = 0
        self._bucket: list[FusedParameter] = []
        self._bucket_size = 0
        self._window: PartialOptimizer | None = None
        self._own_step: ReplacedMethod | None = None
        self.follow_new_parameters()

    def __reduce__(self) -> Any:
        """A copy fuses the copied optimizer, and counts a first step of its own."""
        if type(self) is not BackwardFusion:
            raise TypeError(
                "a fusion under DDP or beside two streams cannot be copied: fuse the copied optimizer, or call "
                ".remove() first"
            )
        options = {
            "bucket_bytes": self.bucket_bytes,
            "clip_value": self.clip_value,
            "side_stream": self._side is not None,
            "backward_passes": self.backward_passes,
            "armed": self.armed,
        }
        return _fuse_again, (self.optimizer, options, self._own_step is not None, self._report)

    def complete_in_step(self) -> None:
        """Let ``optimizer.step()`` of a hand-written loop update what the backward pass left over."""
        self._own_step = ReplacedMethod(self.optimizer, "step", self._step_of_loop)

    def _step_of_loop(self, closure: Callable[[], Any] | None = None) -> Any:
        assert self._own_step is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin_rest()
        self._own_step.inner()
        self.end_step()
        return loss

    def only_when(self, condition: Callable[[], bool]) -> None:
        """Fuse a backward pass only where this holds, too: for loops that know which one belongs to a step."""
        self._condition = condition

    def fuses_now(self) -> bool:
        """Return whether gradients that arrive now are used up at once."""
        return self.armed and (self._condition is None or self._condition())

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes in here only add to ``.grad``; the first one outside updates."""
        return replaced_attributes(self, armed=False)

    def follow_new_parameters(self) -> None:
        """Put the hook on parameters that joined the optimizer, or were unfrozen, since the last call."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._followed:
                    self._followed[parameter] = FusedParameter(parameter, self.backward_passes or 0, self.on_gradient)
        self._report.parameters = len(self._followed)

    def expect_one_graph(self, loss: Tensor) -> None:
        """Tell that this step's one backward pass starts at ``loss``: no parameter need be counted first.

        Unless the graph has nodes written in Python, such as reentrant checkpointing's, which may run a backward pass
        of their own.
        """
        unknown = [followed for followed in self._followed.values() if not followed.uses]
        if unknown and not has_python_nodes(loss):
            for followed in unknown:
                followed.uses = 1

    def on_gradient(self, followed: FusedParameter, parameter: Tensor) -> None:
        """A gradient was added to ``.grad`` of this parameter."""
        gradient = parameter.grad
        if gradient is None:
            return
        size = gradient.nbytes if gradient.layout is torch.strided else nbytes(gradient)
        self._live_bytes += size - followed.live_bytes
        followed.live_bytes = size
        if self._live_bytes > self._report.peak_gradient_bytes:
            self._report.peak_gradient_bytes = self._live_bytes
        if not self.armed or (self._condition is not None and not self._condition()):
            return
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_DERIVATIVE)
        followed.fired += 1
        if followed.fired < followed.uses or not followed.uses:
            return
        if followed.fired > followed.uses:
            refuse_more_gradients(followed)
            return
        self._bucket.append(followed)
        self._bucket_size += size
        if self._bucket_size >= self.bucket_bytes:
            self._update_bucket()

    def _update_bucket(self) -> None:
        if self._window is None:
            self._window = PartialOptimizer(self.optimizer)
        group_of = self._window.group_of
        bucket = [followed for followed in self._take_bucket() if id(followed.parameter) in group_of]
        if not bucket:
            return
        parameters, size = [], 0
        for followed in bucket:
            size += followed.live_bytes
            gradient = followed.parameter.grad
            if gradient is not None and gradient.is_sparse:  # which zero_grad(set_to_none=False) keeps sparse
                followed.guard.sparse_zeros = torch.zeros_like(gradient)
            parameters.append(followed.parameter)
        if self._side is None:
            self._step(self._window, parameters)
        else:
            with self._side.after_current(hold=[p.grad for p in parameters]):
                self._step(self._window, parameters)
        self._live_bytes -= size
        for followed in bucket:
            followed.live_bytes, followed.used = 0, True
            followed.updated = followed.writes()
            followed.put_guard()
        self._note_bucket(len(bucket), size)

    def _take_bucket(self) -> list[FusedParameter]:
        """Empty the bucket; returns what may be updated before ``optimizer.step()``, the report tells of the rest."""
        bucket, self._bucket, self._bucket_size = self._bucket, [], 0
        fusible = []
        for followed, blocker in zip(bucket, fusion_blockers(bucket), strict=True):
            if blocker is None:
                fusible.append(followed)
            else:
                self._hold_back(followed, blocker)
        return fusible

    def _hold_back(self, followed: FusedParameter, why: str) -> None:
        if followed.unfused:
            return
        followed.unfused = True
        if why not in self._report.unfused:
            warn_no_effect(f"backward fusion has no effect on parameters {why}")
        self._report.note_unfused(why)

    def _note_bucket(self, updates: int, size: int) -> None:
        """Count updates that ran together inside a backward pass, from ``size`` bytes of gradients."""
        report = self._report
        report.fused_updates += updates
        report.buckets += 1
        report.largest_bucket_bytes = max(report.largest_bucket_bytes, size)

    def _step(self, window: PartialOptimizer, parameters: list[Tensor]) -> None:
        if self.clip_value is not None:
            clip_by_value([p.grad for p in parameters if p.grad is not None], self.clip_value)
        window.update(parameters)

    def _used(self) -> list[FusedParameter]:
        return [followed for followed in self._followed.values() if followed.used]

    def _join(self) -> None:
        if self._side is not None:
            self._side.join()

    def begin_rest(self) -> None:
        """Before the optimizer's own ``step``: it finds None for used-up gradients, and updates only the rest."""
        self._join()
        self._take_bucket()
        used = self._used()
        refuse_changes(used)
        if self._window is not None and used:
            refuse_new_hyper_parameters(self._window, self.optimizer)
        for followed in used:
            followed.parameter.grad = None
        if self.clip_value is not None:
            clip_by_value([p.grad for p in parameters_of(self.optimizer) if p.grad is not None], self.clip_value)

    def end_step(self) -> None:
        """After the optimizer's own ``step``: close the window, remember the counts of a first step, put the guards."""
        self._join()
        self._report.steps += 1
        used = []
        for followed in self._followed.values():
            if followed.used:
                used.append(followed)
            elif followed.fired:
                self._report.late_updates += 1
            followed.uses = max(followed.uses, followed.fired)
        self._show(used)
        self._close()
        self.follow_new_parameters()

    def _show(self, used: list[FusedParameter]) -> None:
        """Set what ``.grad`` holds after a step in which the gradients were used."""
        for followed in used:
            if followed.parameter.grad is None:
                followed.put_guard()

    def abandon_step(self) -> None:
        """After an exception inside backward: forget the half-done step. Gradients not yet used stay in ``.grad``."""
        self._join()
        self._close()

    def _close(self) -> None:
        self._bucket, self._bucket_size = [], 0
        for followed in self._followed.values():
            followed.fired, followed.used, followed.live_bytes = 0, False, 0
        self._live_bytes = 0
        self._window = None

    def report(self) -> FusionReport:
        """Report of what was fused so far."""
        return self._report

    def remove(self) -> None:
        """Take all hooks and guards off; the optimizer keeps its state."""
        self._join()
        if self._own_step is not None:
            self._own_step.restore()
        for followed in self._followed.values():
            followed.handle.remove()
            if isinstance(followed.parameter.grad, GradientGuard):
                followed.parameter.grad = None
        self._close()
        self._followed.clear()


def _fuse_again(optimizer: Optimizer, options: dict[str, Any], completes: bool, report: FusionReport) -> BackwardFusion:
    fusion = BackwardFusion(optimizer, **options)
    fusion._report = report
    if completes:
        fusion.complete_in_step()
    return fusion
