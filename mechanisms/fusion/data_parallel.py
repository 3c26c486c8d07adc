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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.ddp import Reducer, at_end_of_backward, comm_hook_of, sparse_layer
from retime.foundations.lazy_updates import PartialOptimizer, aliased
from retime.foundations.torch_private.distributed import GradBucket
from retime.foundations.torch_private.engine import graph_task_id
from retime.mechanisms.fusion.backward import ALIASED, BackwardFusion, FusedParameter

CommunicationHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]
USE_FORWARD = (
    "under Lightning pass yours as FusedOptimizerDDPStrategy(ddp_comm_hook=...); in a bare loop fuse before "
    "registering, or use mode='forward'"
)


class ReductionHook:
    """Owns DDP's communication hook, with room for something to do as soon as a bucket is reduced.

    Without a hook of the user's own, gradients are averaged with the arithmetic DDP itself uses, so the bits are those
    of plain DDP.

    Args:
        model: whose buckets are reduced.
        hook: the user's own communication hook, if any.
        state: what that gets.
        reducer: sums gradients where there is no such hook, and is closed with this; None: as DDP does.

    Raises:
        ValueError: a reducer and a hook of your own, or something else has the model's communication hook.
    """

    @checked
    def __init__(
        self,
        model: DistributedDataParallel,
        hook: CommunicationHook | None = None,
        state: Any = None,
        *,
        reducer: Reducer | None = None,
    ) -> None:
        if reducer is not None and hook is not None:
            raise ValueError("a reducer takes the place of a communication hook of your own: leave out one of the two")
        self._listeners: list[DataParallelFusion] = []
        self._slot = comm_hook_of(model)
        self._hook = hook
        self._state = state
        self._reducer = reducer
        self._take()

    def reduces(self, model: nn.Module | None) -> bool:
        """Return whether this hook is that model's."""
        return model is not None and self._slot.is_of(model) and self._slot.owner is self

    def join(self, fusion: "DataParallelFusion") -> None:
        """Let this fusion hear of reduced buckets.

        Raises:
            ValueError: something else has the model's communication hook by now.
        """
        self._take()
        self._listeners.append(fusion)

    def leave(self, fusion: "DataParallelFusion") -> None:
        """Tell this fusion no more; with the last one the communication hook is given back, unless it is a user's."""
        if fusion in self._listeners:
            self._listeners.remove(fusion)
        if not self._listeners and self._hook is None:
            self._slot.give_back(self)

    def close(self, *, failed: bool = False) -> None:
        """Give a reducer back, and the communication hook with it; when no backward pass runs.

        Args:
            failed: whether a reduction may never be done.
        """
        reducer, self._reducer = self._reducer, None
        if reducer is not None:
            self._slot.give_back(self, reducer, failed=failed)

    def _take(self) -> None:
        self._slot.take(self, "backward fusion", USE_FORWARD)
        if self._hook is None:
            self._slot.mean()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the all-reduce of a bucket, and let what is fused update behind it."""
        parameters, buffer = bucket.parameters(), bucket.buffer()
        gradients = [_in_layout_of(p, g) for p, g in zip(parameters, bucket.gradients(), strict=True)]
        own, slot = self._hook, self._slot
        future = own(self._state, bucket) if own is not None else slot.reduce_as_ddp(bucket, self._reducer)
        armed = [fusion for fusion in self._listeners if fusion.fuses_now()]
        if not armed or graph_task_id() == -1:  # in DDP's join() a rank without batches sends zeros, and steps nothing
            return future
        if bucket.is_last():
            for fusion in armed:
                at_end_of_backward(fusion.guard_reduced)

        def then(reduced: torch.futures.Future[Any]) -> Tensor:
            value = reduced.value()
            value = value[0] if isinstance(value, list | tuple) else value
            if value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value)  # a compressing hook returns a tensor of its own; gradients are views of the buffer
            for fusion in armed:
                fusion.update_reduced(parameters, gradients)
            return buffer

        return future.then(then)


def _in_layout_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The bucket's slice as DDP lays it out: with the parameter's strides where these leave no gaps."""
    if parameter.is_contiguous() or torch.empty_like(parameter).stride() != parameter.stride():
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())


def reduction_of(model: DistributedDataParallel) -> ReductionHook:
    """The hook through which fusions of this model hear of reduced buckets; made when there is none.

    Raises:
        ValueError: something else has the model's communication hook, or cannot go through one.
    """
    layer = sparse_layer(model.module)
    if layer is not None:
        raise ValueError(
            f"DDP cannot reduce the sparse gradients of {layer!r} through a communication hook: use sparse=False, or "
            "mode='forward'"
        )
    owner = comm_hook_of(model).owner
    return owner if isinstance(owner, ReductionHook) else ReductionHook(model)


class DataParallelFusion(BackwardFusion):
    """Backward fusion driven by DDP's reduced buckets instead of local gradients.

    Gradients live in DDP's buckets whether or not they were used, so no memory is saved; what is gained is locality and
    an update that overlaps the rest of the backward pass. After the step ``.grad`` holds the reduced gradients again.
    """

    @checked
    def __init__(self, optimizer: Optimizer, reduction: ReductionHook, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._reduction = reduction
        self._lock = threading.Lock()
        self._hidden: dict[FusedParameter, Tensor | None] = {}
        reduction.join(self)

    def on_gradient(self, followed: FusedParameter, parameter: Tensor) -> None:
        """Note that this rank used the parameter, in whichever micro-batch of the step.

        A parameter that no rank used keeps grad=None, which only the end of backward can tell; one that this rank used
        certainly gets the reduced gradient.
        """
        followed.fired = 1
        if parameter.grad is not None:
            size = parameter.grad.nbytes
            self._live_bytes += size - followed.live_bytes
            followed.live_bytes = size
            self._report.peak_gradient_bytes = max(self._report.peak_gradient_bytes, self._live_bytes)

    def update_reduced(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update these parameters from their reduced gradients; called by the thread that completed the all-reduce."""
        with self._lock:
            window = self._window = self._window or PartialOptimizer(self.optimizer)
            shared = aliased(parameters)
            ready = []
            for parameter, gradient in zip(parameters, gradients, strict=True):
                followed = self._followed.get(parameter)
                if followed is None or not followed.fired or id(parameter) not in window.group_of:
                    continue
                if parameter in shared:
                    self._hold_back(followed, ALIASED)
                else:
                    ready.append((followed, gradient))
            if not ready:
                return
            local = [followed.parameter.grad for followed, _ in ready]
            for followed, gradient in ready:
                followed.parameter.grad = gradient
            try:
                self._step(window, [followed.parameter for followed, _ in ready])
            finally:
                for (followed, _), gradient_of_rank in zip(ready, local, strict=True):
                    # DDP writes the reduced gradient there at the end of backward
                    followed.parameter.grad = gradient_of_rank
            for followed, _ in ready:
                followed.used = True
                followed.updated = followed.writes()
            self._note_bucket(len(ready), sum(gradient.nbytes for _, gradient in ready))

    def abandon_step(self) -> None:
        """As without ranks, behind an update that another thread is at."""
        with self._lock:
            super().abandon_step()

    def guard_reduced(self) -> None:
        """Have reads of used gradients raise from the end of backward to the step: clipping it would change nothing."""
        self._hidden = {followed: followed.parameter.grad for followed in self._used()}
        for followed in self._hidden:
            followed.put_guard()

    def _show(self, used: list[FusedParameter]) -> None:
        for followed in used:
            followed.parameter.grad = self._hidden.pop(followed, None)

    def remove(self) -> None:
        """Take all hooks off, and give the communication hook back if no other fusion of this model needs it."""
        self._reduction.leave(self)
        self._show(list(self._hidden))
        super().remove()
