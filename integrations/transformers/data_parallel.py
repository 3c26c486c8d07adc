"""Several processes under ``transformers.Trainer``: gradients out of order or added up on the host; no pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import Trainer

from retime.foundations.arguments import Timeout, checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.messages import parse_bytes
from retime.integrations.accelerate.cpu_accumulate import CPUAccumulate as Accumulate
from retime.integrations.accelerate.out_of_order import OutOfOrderDataParallel as OutOfOrder
from retime.integrations.transformers.during_training import DuringTraining
from retime.mechanisms.cpu_accumulation import HostReductionReport
from retime.mechanisms.out_of_order import K, OutOfOrderReport


class OutOfOrderDataParallel(DuringTraining[OutOfOrderReport]):
    """Hide gradient communication behind weight gradients and the next forward pass, in each ``train()``.

    Start one process per device, as for the plain Trainer (``torchrun``), with
    ``TrainingArguments(ddp_find_unused_parameters=False)``, as otherwise buckets keep their order. Gradients become
    views of DDP's buckets, with the same values. With one process this does nothing, with one
    ``NoEffectWarning``. See :class:`retime.mechanisms.out_of_order.OutOfOrderDataParallel`.

    Args:
        trainer: before its first ``train()``.
        k, max_memory, cross_iteration, blocks: see there.

    Raises:
        ValueError: DeepSpeed, FSDP and DataParallel; a mechanism that does not go with it. When a training begins,
            before its first step, what :class:`retime.mechanisms.out_of_order.OutOfOrderDataParallel` refuses.
    """

    @checked
    def __init__(
        self,
        trainer: Trainer,
        k: K = "auto",
        *,
        max_memory: int | str | None = None,
        cross_iteration: bool = True,
        blocks: Iterable[str] | None = None,
    ) -> None:
        if max_memory is not None:
            parse_bytes("max_memory", max_memory)
        names = None if blocks is None else list(blocks)
        self._options: dict[str, Any] = {"max_memory": max_memory, "cross_iteration": cross_iteration, "blocks": names}
        self._k = k
        super().__init__(trainer, Mechanism.out_of_order(cross_iteration=cross_iteration), OutOfOrderReport())
        handler = trainer.accelerator.ddp_handler
        if handler is not None:  # what the Trainer will wrap the model with
            handler.gradient_as_bucket_view = True

    def _make(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> OutOfOrder:
        return OutOfOrder(accelerator, model, optimizer, self._k, **self._options)


class CPUAccumulate(DuringTraining[HostReductionReport]):
    """Sum gradients on the host's processors, in memory that the ranks of a machine share, in each ``train()``.

    Start one process per device, as for the plain Trainer (``torchrun``). With one process this does nothing, with one
    ``NoEffectWarning``.

    Args:
        trainer: before ``train()``.
        timeout: how long another process may take; None is torch's default.

    Raises:
        ValueError: DeepSpeed, FSDP and DataParallel; a mechanism that does not go with it. When a training begins,
            before its first step, sparse gradients and a custom communication hook.
    """

    @checked
    def __init__(self, trainer: Trainer, *, timeout: Timeout | None = None) -> None:
        self._options = {"timeout": timeout}
        super().__init__(trainer, Mechanism.HOST_REDUCTION, HostReductionReport())

    def _make(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Accumulate:
        return Accumulate(accelerator, model, **self._options)


class OutOfOrderPipeline:
    """Refused, with the reason: the Trainer's loop needs the whole model on each process.

    Raises:
        ValueError: always.
    """

    @checked
    def __init__(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        raise ValueError(
            "a pipeline keeps a part of the model on each process, and the Trainer calls compute_loss with the whole "
            "model, clips by the norm of all its parameters and saves all of them on each process: use "
            "retime.integrations.accelerate.OutOfOrderPipeline in a loop of your own, or Lightning's "
            "strategy='ooo_pipeline'"
        )
