"""Optimizer fusion for ``transformers.Trainer`` (Jiang et al. 2021)."""

from __future__ import annotations

import math
from typing import Annotated, Any

from accelerate import Accelerator
from torch import nn
from transformers import Adafactor, Trainer

from retime.foundations.arguments import Above, checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.lazy_updates import check_bucket_bytes, declare_per_parameter
from retime.foundations.messages import warn_difference
from retime.foundations.patching import layered_methods
from retime.integrations.accelerate.fused_optimizer import FusedOptimizer as Fused
from retime.integrations.transformers.during_training import DuringTraining
from retime.mechanisms.fusion import FusionReport, check_mode

declare_per_parameter(Adafactor)  # of optim="adafactor": its rates and sums are those of one parameter


class FusedOptimizer(DuringTraining[FusionReport]):
    """Fuse a trainer's optimizer into the backward or the next forward pass (Jiang et al. 2021), in each ``train()``.

    Weights, optimizer state, logged losses and checkpoints are bit-identical to the plain Trainer's, with accumulation,
    bf16, evaluation and ``num_items_in_batch``; with clipping by norm and fp16 in forward mode. Checkpoints can be
    resumed by a plain Trainer, and the other way round.

    Args:
        trainer: before ``train()``; one of a class that inherits from ``Trainer`` as well.
        mode: ``"forward"`` goes with everything above. ``"backward"`` frees gradients at once and needs
            ``TrainingArguments(max_grad_norm=0)``, as transformers clips by norm by default. The log then
            has no ``grad_norm``, which a ``DifferenceWarning`` says.
        bucket_bytes: see :func:`retime.fuse_optimizer`.
        clip_value: backward only: clamp gradient elements to [-clip_value, clip_value] before the update.

    Raises:
        ValueError: an ``optim`` that updates in the backward pass by itself; backward mode with ``max_grad_norm`` above
            0, ``fp16`` or ``auto_find_batch_size``; DeepSpeed, FSDP and DataParallel; another fusion or a mechanism
            that does not go with it. When a training begins, before its first step, also all optimizers that
            :func:`retime.fuse_optimizer` refuses.
    """

    @checked
    def __init__(
        self,
        trainer: Trainer,
        mode: str = "backward",
        *,
        bucket_bytes: int | str | None = None,
        clip_value: Annotated[float, Above(0)] | None = None,
    ) -> None:
        self.mode = check_mode(mode)
        check_bucket_bytes(bucket_bytes)
        if clip_value is not None and self.mode == "forward":
            raise ValueError(
                f"clip_value={clip_value!r} is for mode='backward'; in mode='forward' the Trainer clips by norm "
                "(TrainingArguments(max_grad_norm=...))"
            )
        self._options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "clip_value": clip_value}
        self._told = False
        super().__init__(trainer, Mechanism.fusion(self.mode), FusionReport(self.mode))

    def flush(self) -> None:
        """Forward mode: run all pending updates now, before reads through an alias of a parameter's memory."""
        if isinstance(self._made, Fused):
            self._made.flush()

    def _check(self) -> None:
        args = self._trainer.args
        name = str(getattr(args.optim, "value", args.optim))
        if name.endswith(("lomo", "_layerwise")):
            raise ValueError(
                f"optim={name!r} updates inside of the backward pass by itself, and its step does nothing, so there is "
                "nothing to fuse: leave out FusedOptimizer, or choose another optim"
            )
        if self.mode == "forward":
            return
        if args.max_grad_norm:
            raise ValueError(
                f"backward fusion cannot clip by global norm, and this trainer has max_grad_norm={args.max_grad_norm}, "
                "which is transformers' default if nobody gave it: updates run before all gradients exist. Use "
                "mode='forward', or TrainingArguments(max_grad_norm=0) with clip_value=... if wanted"
            )
        if self._trainer.accelerator.scaler is not None:
            raise ValueError(
                "fp16=True scales gradients, and its GradScaler has to see all of them before the first update: use "
                "mode='forward', or TrainingArguments(bf16=True)"
            )
        if args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size trains on after running out of memory, and a backward pass that stopped in the "
                "middle has updated some layers under backward fusion: use mode='forward', or leave "
                "auto_find_batch_size out"
            )

    def _make(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Fused:
        fused = Fused(accelerator, model, optimizer, self.mode, **self._options)
        if self.mode == "backward":
            self._answer_norms(accelerator)
        return fused

    def _answer_norms(self, accelerator: Accelerator) -> None:
        """Without clipping, the Trainer asks for the norm all the same, by an infinite bound, to log it."""
        refuse_clipping = accelerator.clip_grad_norm_

        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if max_norm != math.inf:
                return refuse_clipping(parameters, max_norm, *args, **kwargs)
            if not self._told:
                self._told = True
                warn_difference(
                    "the log has no grad_norm: backward fusion frees gradients before the Trainer asks for their norm. "
                    "Use mode='forward' to log it"
                )
            return None

        self._on.enter_context(layered_methods(accelerator, clip_grad_norm_=clip_grad_norm_))
