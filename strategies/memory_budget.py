"""Training inside a byte budget as a Lightning strategy (moDNN, Chen et al. 2018)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision

from retime.foundations.arguments import checked
from retime.foundations.parts import Split
from retime.mechanisms.memory_budget import BudgetedStep, parse_budget, parse_host
from retime.strategies.support.base import SingleDevice
from retime.strategies.support.budgeted_steps import CHECKPOINT_KEY, Budgeted

__all__ = ["CHECKPOINT_KEY", "MemoryBudgetStrategy"]


class MemoryBudgetStrategy(Budgeted, SingleDevice):
    """One device, and no more of its memory than a number of bytes.

    A budget that is many times what a step needs asks for nothing: the first step is trained and counted, and all run
    as ever. Else the first batch of each shape is profiled by a dry run on tensors without data. If it needs less than
    a third of the budget, it runs as ever. Else ``training_step`` is tried out for real, inside the budget: on a few
    samples and on parts of the batch, with copies to the host; what it leaves in the modules is taken away again. That
    shows whether sub-batches give the same gradients, and what operations and copies take. If the batch fits, it runs
    as ever. Else activations go to the host and come back (bit-identical), or the batch runs in sub-batches whose
    gradients add up to the batch's (up to rounding), or both: of the plans that fit the best few are tried out too, and
    of those that are nearly the fastest the one that moves the least is taken. A budget below the floor is refused
    before the first step, with an error that batch size finders take for out of memory.

    Callbacks, loggers, clipping, accumulation, schedulers and precision plugins see one batch. Two things differ under
    sub-batches: dropout draws other masks, and ``on_before_backward`` is given the first sub-batch's share of the loss.

    ``training_step`` itself, and all that the modules do in it, runs once for each sub-batch and sees only that: a
    counter in it counts sub-batches, a print prints each. A number of the whole batch that it logs or returns and that
    is no sum of the parts' (a standard deviation, a maximum) is named in a warning before the first step.

    Args:
        budget: bytes, ``"8GiB"``, or ``"90%"`` of the device's memory (``"auto"`` means that), for parameters,
            gradients, optimizer states, the batch, activations and what operations need. On a CPU: what training may
            add to the process.
        host: where activations go: ``"memory"`` (for CUDA), ``"disk:FOLDER"`` (for a CPU); None: memory for CUDA, the
            folder for temporary files for a CPU.
        batchnorm: layers with batch statistics keep a batch whole (``"offload"``), or take ``"ghost"`` statistics of
            each sub-batch (other numbers: a choice of yours).
        on_shape_change: ``"replan"`` for batches of another shape, or ``"error"``.
        split_batch: ``split_batch(batch, sub_batch) -> parts``, for batches that cannot be cut by their first
            dimension.
        loss_weight: ``loss_weight(part)`` counts what a part's loss is a mean over, where a probe cannot see it.
        dry_run: what is tried out calls ``training_step`` more often than training does, which shows where it changes
            what is neither tensor nor module: an environment, a replay buffer. A budget that is easily enough needs
            nothing of that: the first step of each shape is trained while it is counted. ``"auto"`` tries out where it
            is not, and says so before; ``"off"`` never does: the first step of each shape runs with everything
            offloaded, and what it saved and held decides what stays on the device from then on. Batches then stay
            whole, and a budget that is too small for that ends training after the first step.
        plan: a file that :meth:`save_plan` or ``retime plan --save`` wrote. Its plans are used, and where they do not
            fit the model, the batch or the budget, an error says so before the first step. Without it plans are chosen
            by measured times, so that two runs may choose differently; with deterministic algorithms, as under
            ``Trainer(deterministic=True)``, by counted bytes and operations, so that all runs choose the same.
        device: the one device; None: the one the Trainer chose.

    All other arguments are :class:`lightning.pytorch.strategies.SingleDeviceStrategy`'s.
    """

    strategy_name = "memory_budget"
    instead = "memory_budget_ddp"

    @checked
    def __init__(
        self,
        budget: int | str = "90%",
        host: str | None = None,
        batchnorm: str = "offload",
        on_shape_change: str = "replan",
        split_batch: Split | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        dry_run: str = "auto",
        plan: str | os.PathLike[str] | None = None,
        device: str | int | torch.device | None = None,
        accelerator: Accelerator | str | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            budget,
            host,
            batchnorm,
            on_shape_change,
            split_batch,
            loss_weight,
            dry_run,
            plan,
            device=device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def _make_step(self, module: LightningModule, **options: Any) -> BudgetedStep:
        budget_bytes = parse_budget(self._budget, self.root_device)
        return BudgetedStep(module, self.optimizers, budget_bytes, parse_host(self._host, self.root_device), **options)
