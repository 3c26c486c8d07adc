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
        self.on_reduced: Callable[[list[Tensor], list[Tensor]], None] | None = None
        self._group = model.process_group
        self._hook = hook
        self._state = state

        def retime_reduction(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return self._reduce(bucket)

        model.register_comm_hook(None, retime_reduction)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        parameters, gradients, buffer = bucket.parameters(), bucket.gradients(), bucket.buffer()
        if self._hook is not None:
            future = self._hook(self._state, bucket)
        else:
            future = average(buffer, is_view=_is_view(parameters[0], gradients[0]), group=self._group)
        act = self.on_reduced
        if act is None:
            return future

        def then(reduced: torch.futures.Future[Any]) -> Tensor:
            value = reduced.value()
            value = value[0] if isinstance(value, list | tuple) else value
            if value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value)  # a compressing hook returns a tensor of its own; gradients are views of the buffer
            act(parameters, gradients)
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


def sparse_layer(model: nn.Module) -> str | None:
    """Name of a layer with sparse gradients: DDP's communication hooks cannot carry them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return name
    return None


class DataParallelFusion(BackwardFusion):
    """Backward fusion driven by DDP's reduced buckets instead of local gradients.

    Gradients live in DDP's buckets whether or not they were used, so ``.grad`` stays readable after the step and no
    memory is saved; what is gained is locality and an update that overlaps the rest of the backward pass.
    """

    def __init__(self, optimizer: Optimizer, reduction: ReductionHook, **options: Any) -> None:
        super().__init__(optimizer, armed=False, **options)
        self._reduction = reduction
        self._lock = threading.Lock()
        self._hidden: list[tuple[Tensor, Tensor | None]] = []

    def arm(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, with updates after each bucket's all-reduce while it runs."""

        def armed_closure() -> Any:
            self._window = OptimizerWindow(self.optimizer)
            self._reduction.on_reduced = self._on_reduced
            try:
                return closure()
            finally:
                self._reduction.on_reduced = None

        return armed_closure

    def _on_gradient(self, parameter: Tensor) -> None:
        # a parameter that no rank used keeps grad=None, which only the end of backward can tell; one that this rank
        # used, in any micro-batch of the step, certainly gets the reduced gradient
        self._fired[parameter] = 1
        if parameter.grad is not None:
            self._count_alive(parameter, nbytes(parameter.grad))

    def _on_reduced(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        with self._lock:
            window = self._window
            assert window is not None
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

    def begin_rest(self) -> None:
        """Hide the used gradients from the optimizer's own step."""
        self._hidden = [(parameter, parameter.grad) for parameter in self._consumed]
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
