"""Optimizer fusion for Accelerate (Jiang et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.lazy_updates import parameters_of
from retime.foundations.patching import layered_methods
from retime.integrations.accelerate.accelerate_private import renew_captured_steps
from retime.integrations.accelerate.prepared import (
    ONE_PROCESS_OR_DDP,
    note_gone,
    note_there,
    prepared_for_ranks,
    prepared_optimizer,
    refuse_beside,
)
from retime.mechanisms.fusion import BackwardFusion, ForwardFusion, FusionReport, check_mode, fuse_optimizer


class FusedOptimizer:
    """Fuse a prepared optimizer into the backward or the next forward pass (Jiang et al. 2021).

    The loop stays as it is, ``with accelerator.accumulate(model):`` included: in backward mode only the backward pass
    that synchronises gradients updates. Weights and optimizer state are bit-identical to the plain loop's.

    Args:
        mode: ``"backward"`` or ``"forward"``; only the latter goes with gradient-norm clipping and with fp16.
        clip_value: backward only: clamp gradient elements to [-clip_value, clip_value] before the update.

    Raises:
        ValueError: in backward mode fp16's GradScaler, a memory budget beside it, and with several processes another
            model than ``prepare`` wrapped; FSDP, DeepSpeed and other engines that own the optimizer, and all that
            :func:`retime.fuse_optimizer` refuses.
    """

    @checked
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        mode: str = "backward",
        *,
        bucket_bytes: int | str | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.mode = check_mode(mode)
        if accelerator.distributed_type not in ONE_PROCESS_OR_DDP:
            raise ValueError(
                f"{accelerator.distributed_type} owns the optimizer's step: fuse the optimizer on one device or under "
                "DistributedDataParallel"
            )
        if self.mode == "backward" and accelerator.scaler is not None:
            raise ValueError(
                "mixed_precision='fp16' scales gradients, and its GradScaler has to see all of them before the first "
                "update: use mode='forward', or mixed_precision='bf16'"
            )
        if self.mode == "backward" and accelerator.num_processes > 1:
            prepared_for_ranks(accelerator, model, type(self).__name__)
        self._clipping = ExitStack()
        self._optimizer = prepared_optimizer(optimizer, type(self).__name__)
        self._mechanism = Mechanism.fusion(self.mode)
        refuse_beside(self._optimizer, self._mechanism)
        self._fusion = fuse_optimizer(
            model, self._optimizer.optimizer, self.mode, bucket_bytes=bucket_bytes, clip_value=clip_value
        )
        if isinstance(self._fusion, BackwardFusion):
            self._fusion.only_when(lambda: bool(accelerator.sync_gradients))
            self._clipping.enter_context(self._refuse_norm_clipping(accelerator))
        renew_captured_steps(self._optimizer)
        note_there(self._optimizer, self._mechanism)

    def _refuse_norm_clipping(self, accelerator: Accelerator) -> AbstractContextManager[None]:
        plain = accelerator.clip_grad_norm_

        def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if not set(parameters_of(self._optimizer.optimizer)).isdisjoint(given):
                raise RuntimeError(
                    "backward fusion cannot clip by global norm: updates run before all gradients exist. Use "
                    "mode='forward', or clip_value=... with mode='backward'"
                )
            return plain(given, *args, **kwargs)

        return layered_methods(accelerator, clip_grad_norm_=clip_grad_norm_)

    def flush(self) -> None:
        """Forward mode: run all pending updates now, before reads through an alias of a parameter's memory."""
        if isinstance(self._fusion, ForwardFusion):
            self._fusion.flush()

    def abandon_step(self) -> None:
        """After an exception inside ``backward()``: drop the incomplete step, to go on with the next batch."""
        if isinstance(self._fusion, BackwardFusion):
            self._fusion.abandon_step()

    def report(self) -> FusionReport:
        """Report of what was fused so far."""
        return self._fusion.report()

    def remove(self) -> None:
        """Run all pending updates and remove all hooks."""
        self._fusion.remove()
        note_gone(self._optimizer, self._mechanism)
        self._clipping.close()
        renew_captured_steps(self._optimizer)
