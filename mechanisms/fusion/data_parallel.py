"""Backward fusion under DistributedDataParallel: update a bucket's parameters once its all-reduce has ended.

Jiang et al. 2021, section C.5. DDP's own buckets serve as fusion's. The update runs as a continuation of the bucket's
all-reduce: on gloo in the thread that completed it, beside the backward pass, on NCCL on the stream of the future's
callbacks. torch's own fused DDP optimizer allows neither a communication hook, nor ``no_sync``, nor accumulation; here
all three work, because only the backward pass that belongs to a step is armed.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.mechanisms.fusion.backward import BackwardFusion, clip_by_value
from retime.mechanisms.fusion.narrow import OptimizerWindow, nbytes

CommunicationHook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


class ReductionHook:
    """DDP's communication hook, with room for something to do as soon as a bucket is reduced.

    ``hook`` and ``state`` are the user's own communication hook, if any; without one, gradients are averaged with the
    arithmetic DDP itself uses (a division where ``.grad`` is a view of the bucket, a multiplication by the rounded
    reciprocal otherwise), so the bits are those of plain DDP.
    """

    def __init__(
        self, model: DistributedDataParallel, hook: CommunicationHook | None = None, state: Any = None
    ) -> None:
        self.listeners: list[DataParallelFusion] = []
        self._group = model.process_group
        self._hook = hook
        self._state = state

        def retime_reduction(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return self._reduce(bucket)

        try:
            model.register_comm_hook(None, retime_reduction)
        except RuntimeError as error:
            raise ValueError(
                "backward fusion needs DDP's communication hook, and this model has one already: under Lightning pass "
                "yours as FusedOptimizerDDPStrategy(ddp_comm_hook=...); in a bare loop fuse before registering, or use "
                "mode='forward'"
            ) from error
        model._retime_reduction = self

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        parameters, gradients, buffer = bucket.parameters(), bucket.gradients(), bucket.buffer()
        if self._hook is not None:
            future = self._hook(self._state, bucket)
        else:
            future = average(buffer, is_view=_is_view(parameters[0], gradients[0]), group=self._group)
        armed = [fusion for fusion in self.listeners if fusion.armed and fusion.wanted()]
        if not armed:
            return future
        if bucket.is_last():
            _at_end_of_backward(lambda: [fusion.guard_reduced() for fusion in armed])

        def then(reduced: torch.futures.Future[Any]) -> Tensor:
            value = reduced.value()
            value = value[0] if isinstance(value, list | tuple) else value
            if value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value)  # a compressing hook returns a tensor of its own; gradients are views of the buffer
            for fusion in armed:
                fusion.update_reduced(parameters, gradients)
            return buffer

        return future.then(then)


def average(buffer: Tensor, *, is_view: bool, group: Any) -> torch.futures.Future[Tensor]:
    """Start the all-reduce that replaces ``buffer`` by its mean over the ranks."""
    ranks = dist.get_world_size(group)
    if is_view:
        buffer.div_(ranks)
    else:
        buffer.mul_(1.0 / ranks)
    future: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _is_view(parameter: Tensor, gradient: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr()


def reduction_of(model: DistributedDataParallel) -> ReductionHook:
    """The model's reduction hook, made when there is none; DDP takes one communication hook for life."""
    layer = sparse_layer(model.module)
    if layer is not None:
        raise ValueError(
            f"DDP cannot reduce the sparse gradients of {layer!r} through a communication hook: use sparse=False, or "
            "mode='forward'"
        )
    found = getattr(model, "_retime_reduction", None)
    return found if isinstance(found, ReductionHook) else ReductionHook(model)


def sparse_layer(model: nn.Module) -> str | None:
    """Name of a layer with sparse gradients: DDP's communication hooks cannot carry them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return name
    return None


class DataParallelFusion(BackwardFusion):
    """Backward fusion driven by DDP's reduced buckets instead of local gradients.

    Gradients live in DDP's buckets whether or not they were used, so no memory is saved; what is gained is locality and
    an update that overlaps the rest of the backward pass. After the step ``.grad`` holds the reduced gradients again.
    """

    def __init__(self, optimizer: Optimizer, reduction: ReductionHook, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._reduction = reduction
        reduction.listeners.append(self)
        self._lock = threading.Lock()
        self._hidden: list[tuple[Tensor, Tensor | None]] = []

    def _on_gradient(self, parameter: Tensor) -> None:
        # a parameter that no rank used keeps grad=None, which only the end of backward can tell; one that this rank
        # used, in any micro-batch of the step, certainly gets the reduced gradient
        self._fired[parameter] = 1
        if parameter.grad is not None:
            self._count_alive(parameter, nbytes(parameter.grad))

    def update_reduced(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update these parameters from their reduced gradients; called by the thread that completed the all-reduce."""
        with self._lock:
            window = self._window = self._window or OptimizerWindow(self.optimizer)
            ready = [(p, g) for p, g in zip(parameters, gradients, strict=True) if p in self._fired and window.holds(p)]
            if not ready:
                return
            if self.clip_value is not None:
                clip_by_value([gradient for _, gradient in ready], self.clip_value)
            local = [parameter.grad for parameter, _ in ready]
            for parameter, gradient in ready:
                parameter.grad = gradient
            try:
                window.update([parameter for parameter, _ in ready])
            finally:
                for (parameter, _), gradient_of_rank in zip(ready, local, strict=True):
                    parameter.grad = gradient_of_rank  # DDP writes the reduced gradient there at the end of backward
            self._consumed += [parameter for parameter, _ in ready]
            report = self._report
            report.fused_updates += len(ready)
            report.buckets += 1
            report.largest_bucket_bytes = max(report.largest_bucket_bytes, sum(nbytes(g) for _, g in ready))

    def guard_reduced(self) -> None:
        """From the end of backward to the step, a read of a used gradient raises: clipping it would change nothing."""
        self._hidden = [(parameter, parameter.grad) for parameter in self._consumed]
        if self.guard_at_once:
            self._put_guards(self._consumed)

    def begin_rest(self) -> None:
        """Hide the used gradients from the optimizer's own step."""
        super().begin_rest()

    def end_step(self) -> None:
        """Show the reduced gradients again and close the step."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        self._report.steps += 1
        self._report.late_updates += len(self._fired) - len(self._consumed)
        self._reset()
        self.follow_new_parameters()

    def remove(self) -> None:
        """Take all hooks off; the communication hook stays and does what DDP itself would."""
        self._reduction.listeners.remove(self)
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        super().remove()


def _at_end_of_backward(act: Callable[[], Any]) -> None:
    """Run ``act`` after DDP's own end-of-backward callback, which is queued when this bucket's hook has returned."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(act))
