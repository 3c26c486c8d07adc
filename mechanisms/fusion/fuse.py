"""``fuse_optimizer``: optimizer fusion for a hand-written loop."""

from typing import Annotated, Literal, overload

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import Above, AtLeast, checked
from retime.foundations.lazy_updates import (
    is_fused_step,
    parameters_of,
    why_not_separable,
    why_not_this_step,
    why_not_this_zero_grad,
)
from retime.foundations.torch_private.nn_and_optim import backward_hooks
from retime.mechanisms.fusion.backward import BackwardFusion
from retime.mechanisms.fusion.data_parallel import DataParallelFusion, reduction_of
from retime.mechanisms.fusion.forward import ForwardFusion
from retime.mechanisms.fusion.report import check_mode


@overload
def fuse_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    mode: Literal["backward"] = ...,
    *,
    bucket_bytes: int | str | None = ...,
    clip_value: float | None = ...,
    side_stream: bool = ...,
    backward_passes: int | None = ...,
) -> BackwardFusion: ...
@overload
def fuse_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    mode: Literal["forward"],
    *,
    bucket_bytes: int | str | None = ...,
    clip_value: float | None = ...,
    side_stream: bool = ...,
    backward_passes: int | None = ...,
) -> ForwardFusion: ...
@overload
def fuse_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    mode: str,
    *,
    bucket_bytes: int | str | None = ...,
    clip_value: float | None = ...,
    side_stream: bool = ...,
    backward_passes: int | None = ...,
) -> BackwardFusion | ForwardFusion: ...
@checked
def fuse_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    mode: str = "backward",
    *,
    bucket_bytes: int | str | None = None,
    clip_value: Annotated[float, Above(0)] | None = None,
    side_stream: bool = False,
    backward_passes: Annotated[int, AtLeast(1)] | None = None,
) -> BackwardFusion | ForwardFusion:
    """Fuse ``optimizer`` into the passes of ``model`` (Jiang et al. 2021, section 3); the loop stays as it is.

    ``mode="backward"`` updates parameters inside ``loss.backward()`` and frees their gradients at once, so that reading
    one raises an error; ``optimizer.step()`` updates what is left. Several backward
    passes a step work (the first step counts them, or wrap all but the last in ``with fusion.accumulate():``).
    ``mode="forward"`` defers the updates to the next read of each parameter, usually the next forward pass.

    Parameters and optimizer state are bit-identical to the plain loop's.

    Under ``DistributedDataParallel`` backward mode updates each bucket after its all-reduce; it takes the model's
    communication hook. There all backward passes of a step but the last are to be in ``model.no_sync()``.

    Args:
        model: whose passes the updates join.
        optimizer: of its parameters.
        mode: ``"backward"`` or ``"forward"``.
        bucket_bytes: gradients (backward) or parameters (forward) gathered before a multi-tensor update, a number or a
            text such as ``"4MiB"``; None: 1 MiB on a CPU, 8 MiB on CUDA.
        clip_value: backward only: clamp the gradient elements of the optimizer's parameters, and of no others, to
            [-clip_value, clip_value] before the update.
        side_stream: backward on CUDA only: run updates on a stream beside the backward pass.
        backward_passes: backward only: backward passes in each step, when known. Then the first step is fused too, and
            its peak of memory is already the lower one; a step with more passes raises.

    Returns:
        The fusion, with ``report()`` and ``remove()``.

    Raises:
        ValueError: the mode is unknown, the optimizer holds no parameter of the model or parameters on another device,
            or it cannot be updated parameter by parameter (LBFGS, step hooks, a custom ``step``).
    """
    mode = check_mode(mode)
    if mode == "backward":
        if side_stream and isinstance(model, DistributedDataParallel):
            raise ValueError("side_stream is for one device: under DDP updates follow the all-reduce on its own stream")
        if backward_passes is not None and isinstance(model, DistributedDataParallel):
            raise ValueError(
                "backward_passes is for one device: under DDP an update follows the all-reduce, so wrap all backward "
                "passes of a step but the last in model.no_sync() or fusion.accumulate()"
            )
        check_can_fuse_in_backward(model, optimizer)
        fusion = (
            DataParallelFusion(optimizer, reduction_of(model), bucket_bytes=bucket_bytes, clip_value=clip_value)
            if isinstance(model, DistributedDataParallel)
            else BackwardFusion(
                optimizer,
                bucket_bytes=bucket_bytes,
                clip_value=clip_value,
                side_stream=side_stream,
                backward_passes=backward_passes,
            )
        )
        fusion.complete_in_step()
        return fusion
    check_can_fuse(model, optimizer)
    if clip_value is not None:
        raise ValueError("clip_value is for mode='backward'; in mode='forward' call torch.nn.utils.clip_grad_value_")
    if side_stream:
        raise ValueError("side_stream is for mode='backward'; in mode='forward' updates precede their layer's forward")
    if backward_passes is not None:
        raise ValueError("backward_passes is for mode='backward'; in mode='forward' a step may have any number of them")
    return ForwardFusion(optimizer, model, bucket_bytes=bucket_bytes)


def check_can_fuse_in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError if updates inside of the backward pass can't be right, saying what to change."""
    check_can_fuse(model, optimizer)
    for name, module in model.named_modules():
        if any(backward_hooks(module)):
            raise ValueError(
                f"the backward hook of {name or 'the model'} may read weights that are updated already by then: "
                "use mode='forward', or remove the hook"
            )
    reason = why_not_this_zero_grad(optimizer)
    if reason is not None:
        raise ValueError(f"cannot fuse this optimizer into the backward pass: {reason}")


def check_can_fuse(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError if fusing this pair can't be right, saying what to change."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"the optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    reason = why_not_separable(optimizer) or why_not_this_step(optimizer)
    if reason is not None:
        raise ValueError(f"cannot fuse this optimizer: {reason}")
    if is_fused_step(optimizer.__dict__.get("step")):
        raise ValueError("this optimizer is fused already: call .remove() on the first fusion before fusing it again")
    if isinstance(model, FullyShardedDataParallel) or any(isinstance(p, DTensor) for p in parameters_of(optimizer)):
        raise ValueError(
            "fully sharded parameters are updated shard by shard, by FSDP: to fuse the optimizer, use one device or "
            "DistributedDataParallel"
        )
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel copies parameters behind Python's back: use DistributedDataParallel")
    ours = set(model.parameters())
    shared = [p for p in parameters_of(optimizer) if p in ours]
    if not shared:
        raise ValueError(
            "the optimizer holds no parameter of the model: build it from model.parameters() after moving or wrapping "
            "the model"
        )
    devices = {p.device for p in shared}
    for parameter in shared:
        state = optimizer.state.get(parameter, {})
        moment = next((v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() > 0), None)
        if moment is not None and moment.device != parameter.device:
            raise ValueError(
                f"optimizer state is on {moment.device}, its parameter on {parameter.device}: load the optimizer's "
                "state after moving the model"
            )
    if any(device.type == "meta" for device in devices):
        raise ValueError("the model has parameters on the meta device: materialise them before fusing the optimizer")
