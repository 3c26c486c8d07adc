"""Forward fusion: update parameters as late as possible (Jiang et al. 2021, section 3, algorithm 2).

``optimizer.step()`` notes what is to be done - the gradients, and the hyper-parameters as they stand now - and returns.
Each bucket is updated when something first reads one of its parameters, usually the next forward pass, where the fresh
values are still in the caches. All gradients exist at ``step()``, so whatever needs global information (global-norm
clipping, GradScaler, gradient logging) is exact. They are freed one by one in the next forward pass.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.lazy_updates import (
    OpaqueCalls,
    PartialOptimizer,
    PendingUpdate,
    ReplacedMethod,
    WatchedState,
    aliased,
    apply_pending,
    check_bucket_bytes,
    default_bucket_bytes,
    flush_before_opaque_forward,
    gradient_of,
    is_declared,
    is_torchs_zero_grad,
    nbytes,
    parameters_of,
    unwatch,
    unwatchable,
    unwatchable_parameters,
    watch,
    why_not_separable,
)
from retime.foundations.messages import warn_no_effect
from retime.foundations.torch_private.engine import compilation_callbacks, compiled_call
from retime.foundations.torch_private.tensors import version_of, without_subclass_functions
from retime.mechanisms.fusion.report import FusionReport

NOTHING_CAN_WAIT = (
    "all parameters are inside compiled or scripted modules, or share their memory with other tensors or arrays, where "
    "reads cannot be seen; use mode='backward'"
)


class ForwardFusion:
    """Defers the optimizer's updates to the next read; see :func:`retime.mechanisms.fusion.fuse_optimizer`.

    Args:
        gradients_in_buckets: they may be DDP's, and :meth:`flush` is called before each backward pass.
    """

    @checked
    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        *,
        bucket_bytes: int | str | None = None,
        gradients_in_buckets: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.bucket_bytes = check_bucket_bytes(bucket_bytes) or default_bucket_bytes(parameters_of(optimizer))
        self._model = model
        self._layer: dict[Tensor, int] = {}
        """The number, in model order, of the module that owns the parameter (its first owner, if it is tied)."""
        if model is not None:
            for number, module in enumerate(model.modules()):
                for parameter in module.parameters(recurse=False):
                    self._layer.setdefault(parameter, number)
        self._unwatchable = unwatchable_parameters(model) if model is not None else set()
        self._modules = list(model.modules()) if model is not None else []
        self._report = FusionReport(mode="forward", parameters=len(parameters_of(optimizer)))
        self._pending: list[PendingUpdate] = []
        self.is_removed = False
        """Whether the optimizer has its own methods back."""
        self._handles: list[Any] = [OpaqueCalls()]
        if model is not None:
            self._handles += flush_before_opaque_forward(model)
        self._in_buckets = gradients_in_buckets or isinstance(model, DistributedDataParallel)
        if isinstance(model, DistributedDataParallel):
            # gradients may live in DDP's buckets, which the coming backward pass overwrites
            self._handles.append(model.register_forward_hook(_FlushAfter(self)))
        method = weakref.WeakMethod(self._on_compilation)  # torch's list of callbacks would keep model and state alive
        self._hear: Any = lambda *_: (on_compilation := method()) is not None and on_compilation()
        weakref.finalize(self, _forget, self._hear)
        self._hear_of_compilations()
        self._handles.append(optimizer.register_state_dict_pre_hook(lambda _: self.flush()))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush()))
        self._step = ReplacedMethod(optimizer, "step", self._deferred_step)
        self._zero_grad = ReplacedMethod(optimizer, "zero_grad", self._clear)

    def __reduce__(self) -> Any:
        """A copy defers the updates of the copied optimizer."""
        if type(self) is not ForwardFusion:
            raise TypeError("this fusion waits for DDP's gradients and cannot be copied: call .remove() first")
        self.flush()
        return _fuse_again, (self.optimizer, self._model, self.bucket_bytes, self._report)

    def _clear(self, *args: Any, **kwargs: Any) -> None:
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        if not set_to_none or not is_torchs_zero_grad(self._zero_grad.inner):
            self.flush()  # what is written into the gradients now, or read from them, comes after the updates
            apply_pending(parameters_of(self.optimizer))  # and behind sums that are on their way
        with without_subclass_functions():
            self._zero_grad.inner(*args, **kwargs)

    def _deferred_step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.flush()  # parameters that no forward pass read
        if any(map(compiled_call, self._modules)):
            assert self._model is not None
            self._unwatchable |= unwatchable_parameters(self._model)
        reason = why_not_separable(self.optimizer)
        if reason is not None:
            return self._plain_step(reason, loss)
        self._settle_others()
        self._hear_of_compilations()
        stepped = [p for p in parameters_of(self.optimizer) if gradient_of(p) is not None]
        sets_up = is_declared(self.optimizer) and not self._report.steps  # its groups, perhaps by all that is in them
        deferred = [] if sets_up else self._deferrable(stepped)
        if stepped and not deferred and not sets_up:
            return self._plain_step(NOTHING_CAN_WAIT, loss)
        state = watch(self.optimizer, self.flush)
        window = PartialOptimizer(self.optimizer, snapshot=True)
        self._step_the_rest(deferred)
        for bucket, wait in self._waiting_buckets(deferred):
            self._pending.append(PendingUpdate(bucket, _Apply(window, bucket, state, wait)))
            self._report.buckets += 1
        self._report.steps += 1
        self._report.fused_updates += len(deferred)
        return loss

    def _hear_of_compilations(self) -> None:
        """Compiled code reads parameters unseen; ``torch._dynamo.reset()`` forgets whom to tell."""
        if self._hear not in compilation_callbacks.start_callbacks:
            compilation_callbacks.register_start_callback(self._hear)

    def _settle_others(self) -> None:
        """Another optimizer's updates of the same parameters come first."""
        apply_pending(parameters_of(self.optimizer))

    def _waiting_buckets(self, parameters: list[Tensor]) -> list[tuple[list[Tensor], Callable[[], None] | None]]:
        """The buckets, each with what its update must wait for."""
        return [(bucket, None) for bucket in self._buckets(parameters)]

    def _plain_step(self, reason: str, loss: Any) -> Any:
        if reason not in self._report.plain_steps:
            warn_no_effect(f"forward fusion has no effect on these steps: {reason}")
        self._report.note_plain(reason)
        self._step.inner()
        return loss

    def _deferrable(self, parameters: list[Tensor]) -> list[Tensor]:
        unseen = unwatchable(parameters) | self._unwatchable
        if not self._in_buckets:  # else they share memory, and updates do not wait for the next backward pass
            gradients = ((p, gradient_of(p)) for p in parameters)
            dense = {p: g for p, g in gradients if g is not None and g.layout is torch.strided}
            shared = aliased(dense.values())
            unseen |= {p for p, gradient in dense.items() if gradient in shared}
        # a parameter of another model has readers that nobody examined
        return [p for p in parameters if p not in unseen and (self._model is None or p in self._layer)]

    def _step_the_rest(self, deferred: list[Tensor]) -> None:
        """The optimizer's own step, for what cannot wait: it counts the step for schedulers, whatever is left."""
        later = {id(p) for p in deferred}
        groups = self.optimizer.param_groups
        rest = [{**group, "params": [p for p in group["params"] if id(p) not in later]} for group in groups]
        self._report.late_updates += sum(gradient_of(p) is not None for group in rest for p in group["params"])
        counts = is_declared(self.optimizer)  # perhaps in its groups, so that empty ones take part
        self.optimizer.param_groups = [group for group in rest if counts or group["params"]]
        try:
            with watch(self.optimizer, self.flush).update_runs():
                self._step.inner()
        finally:
            self.optimizer.param_groups = groups
        if counts:
            for group, stepped in zip(groups, rest, strict=True):
                group.update({**stepped, "params": group["params"]})

    def _buckets(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Return buckets layer by layer in model order: reading a bias must not update the next layer too early."""
        last = len(self._layer)
        ordered = sorted(parameters, key=lambda p: self._layer.get(p, last))
        buckets: list[list[Tensor]] = []
        size, layer = self.bucket_bytes, -1
        for parameter in ordered:
            of = self._layer.get(parameter, last)
            if size >= self.bucket_bytes and (of != layer or of == last):
                buckets.append([])
                size = 0
            layer = of
            buckets[-1].append(parameter)
            size += nbytes(parameter)
            self._report.largest_bucket_bytes = max(self._report.largest_bucket_bytes, size)
        return buckets

    def _on_compilation(self) -> None:
        """Compiled code reads memory directly, and nobody can tell which parameters it will read: none may wait."""
        self.flush()
        self._unwatchable.update(parameters_of(self.optimizer))

    def flush(self) -> None:
        """Run every update that is still pending, now.

        Needed only before reads that bypass Python: ``torch.func`` transforms of the parameters, DLPack, copies by
        ``torch.tensor``, ``torch.asarray``, ``torch.as_tensor(p, dtype=...)``, ``new`` and ``new_tensor``, replaying a
        CUDA graph, the state of one parameter (``optimizer.state[p]``) that was kept from before the step.
        """
        for update in list(self._pending):
            update.settle()
            with contextlib.suppress(ValueError):  # another thread flushed too
                self._pending.remove(update)

    def report(self) -> FusionReport:
        """Report of what was deferred so far."""
        return self._report

    def remove(self) -> None:
        """Bring all parameters up to date and give the optimizer its own methods back."""
        if self.is_removed:
            return
        self.is_removed = True
        self.flush()
        _forget(self._hear)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        unwatch(self.optimizer)
        self._step.restore()
        self._zero_grad.restore()


def _forget(callback: Callable[..., Any]) -> None:
    if callback in compilation_callbacks.start_callbacks:
        compilation_callbacks.remove_start_callback(callback)


def _fuse_again(
    optimizer: Optimizer, model: nn.Module | None, bucket_bytes: int, report: FusionReport
) -> ForwardFusion:
    fusion = ForwardFusion(optimizer, model, bucket_bytes=bucket_bytes)
    fusion._report = report
    return fusion


class _FlushAfter:
    """A hook behind DDP's forward pass; in a copy of the model, whose updates do not wait, it does nothing."""

    def __init__(self, fusion: ForwardFusion | None) -> None:
        self._fusion = fusion

    def __call__(self, *_: Any) -> None:
        if self._fusion is not None:
            self._fusion.flush()

    def __reduce__(self) -> Any:
        return _FlushAfter, (None,)


class _Apply:
    """Steps one bucket from gradients that were put aside, once ``wait`` has returned."""

    def __init__(
        self, window: PartialOptimizer, bucket: list[Tensor], state: WatchedState, wait: Callable[[], None] | None
    ) -> None:
        self._window, self._bucket, self._state, self._wait = window, bucket, state, wait
        self._gradients: list[Any] = [parameter.grad for parameter in bucket]
        self._versions = [version_of(gradient) for gradient in self._gradients]

    def __call__(self) -> None:
        if self._wait is not None:
            self._wait()
        with self._state.update_runs():  # the window is shared by all buckets of a step
            self._update()

    def _update(self) -> None:
        present = [p.grad for p in self._bucket]
        for parameter, gradient, version in zip(self._bucket, self._gradients, self._versions, strict=True):
            if version_of(gradient) != version:
                raise RuntimeError(
                    f"a gradient of shape {tuple(gradient.shape)} was changed in place between optimizer.step() and "
                    "the update, which forward fusion runs at the next read: call fusion.flush() after "
                    "optimizer.step(), or optimizer.zero_grad() before the next backward()"
                )
            parameter.grad = gradient
        try:
            self._window.update(self._bucket)
        finally:
            for parameter, gradient in zip(self._bucket, present, strict=True):
                parameter.grad = gradient
