"""Optimizer fusion for Accelerate: an object applied after ``accelerator.prepare()``.

Accelerate has no entry point for plug-ins of others and its Trainer builds the Accelerator itself, so the object works
on what ``prepare`` returned. It needs nothing from a loop, and can be made in a ``TrainerCallback`` too.
"""

from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from retime.mechanisms.fusion.backward import BackwardFusion
from retime.mechanisms.fusion.forward import ForwardFusion
from retime.mechanisms.fusion.fuse import fuse_optimizer
from retime.mechanisms.fusion.report import FusionReport, check_mode

_ONE_PROCESS_OR_DDP = {
    DistributedType.NO,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_CPU,
}


class FusedOptimizer:
    """Fuse a prepared optimizer into the backward or the next forward pass (Jiang et al. 2021).

    The loop stays as it is, ``with accelerator.accumulate(model):`` included: in backward mode only the backward pass
    that synchronises gradients updates. Weights and optimizer state are bit-identical to the plain loop's.

    :param mode: ``"backward"`` or ``"forward"``; only the latter goes with gradient-norm clipping and with fp16.
    :param clip_value: backward only: clamp gradient elements to [-clip_value, clip_value] before the update.
    :raises ValueError: fp16's GradScaler in backward mode, FSDP, DeepSpeed and other engines that own the optimizer,
        and all that :func:`retime.fuse_optimizer` refuses.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        mode: str = "backward",
        *,
        bucket_bytes: int | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.mode = check_mode(mode)
        if accelerator.distributed_type not in _ONE_PROCESS_OR_DDP:
            raise ValueError(
                f"{accelerator.distributed_type} owns the optimizer's step: fuse the optimizer on one device or under "
                "DistributedDataParallel"
            )
        if self.mode == "backward" and accelerator.scaler is not None:
            raise ValueError(
                "mixed_precision='fp16' scales gradients, and its GradScaler has to see all of them before the first "
                "update: use mode='forward', or mixed_precision='bf16'"
            )
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise TypeError(
                f"apply FusedOptimizer after accelerator.prepare(...): it takes the optimizer that prepare returned, "
                f"got {type(optimizer).__name__}"
            )
        self._accelerator = accelerator
        self._optimizer = optimizer
        self._fusion = fuse_optimizer(
            model, optimizer.optimizer, self.mode, bucket_bytes=bucket_bytes, clip_value=clip_value
        )
        if isinstance(self._fusion, BackwardFusion):
            self._fusion.wanted = lambda: bool(accelerator.sync_gradients)
            self._refuse_norm_clipping()
        self._renew_captured_steps()

    def _refuse_norm_clipping(self) -> None:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                "backward fusion cannot clip by global norm: updates run before all gradients exist. Use "
                "mode='forward', or clip_value=... with mode='backward'"
            )

        self._accelerator.clip_grad_norm_ = clip_grad_norm_

    def _renew_captured_steps(self) -> None:
        """With a scaler, AcceleratedOptimizer holds the step methods that it found when it was made."""
        if self._optimizer.scaler is not None:
            step = self._optimizer.optimizer.step
            self._optimizer._optimizer_original_step_method = step
            self._optimizer._optimizer_patched_step_method = patch_optimizer_step(self._optimizer, step)

    def flush(self) -> None:
        """Forward mode: run all pending updates now, for readers that hold an alias of a parameter's memory."""
        if isinstance(self._fusion, ForwardFusion):
            self._fusion.flush()

    def report(self) -> FusionReport:
        """What was fused so far."""
        return self._fusion.report()

    def remove(self) -> None:
        """Bring all parameters up to date and take everything off again."""
        self._fusion.remove()
        self._accelerator.__dict__.pop("clip_grad_norm_", None)
        self._renew_captured_steps()
