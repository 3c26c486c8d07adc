"""Training inside a byte budget as a Lightning strategy (moDNN, Chen et al. 2019)."""

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
from retime.foundations.parts import BatchNormChoice, Split
from retime.foundations.parts import split_batch as cut
from retime.mechanisms.memory_budget import BudgetedStep, BudgetOptions, DryRuns, OnShapeChange
from retime.strategies.support.base import SingleDevice
from retime.strategies.support.budgeted_steps import Budgeted


class MemoryBudgetStrategy(Budgeted, SingleDevice):
    """One device, using no more of its memory than a number of bytes.

    If the budget is many times what a step needs, the first step is trained and counted, and no plan is made. Else the
    first batch of each shape is profiled by a dry run on tensors without data. If it needs less than a third of the
    budget, it runs without a plan. Else ``training_step`` is tried on a few samples and on parts of the batch, inside
    the budget, with copies to the host; what it changes in the modules is undone. This
    shows whether sub-batches give the same gradients, and how long operations and copies take. If the batch does not
    fit, activations are offloaded to the host (bit-identical), or the batch runs in sub-batches whose
    gradients add up to the batch's (up to rounding), or both: the best few plans are tried out, and
    of those that are nearly the fastest the one that moves the fewest bytes is taken. If no plan fits, an error comes
    before the first step, which batch size finders treat as out of memory.

    Callbacks, loggers, clipping, accumulation, schedulers and precision plugins see one batch. Two things differ under
    sub-batches: dropout draws other masks, and ``on_before_backward`` is given the first sub-batch's share of the loss.

    ``training_step`` runs once per sub-batch: a counter in it counts sub-batches. A number that it logs or returns for
    the whole batch and that is no mean or sum of the parts' numbers (a standard deviation) is named in a
    warning before the first step.

    Args:
        budget: bytes, ``"8GiB"``, or ``"90%"`` of the device's memory (``"auto"`` means that), for parameters,
            gradients, optimizer states, the batch, activations and what operations need. On a CPU: what training may
            add to the process.
        host: where activations go: ``"memory"`` (for CUDA), ``"disk:FOLDER"`` (for a CPU); None: memory for CUDA, the
            folder for temporary files for a CPU.
        batchnorm: layers with batch statistics keep a batch whole (``"offload"``), or take ``"ghost"`` statistics of
            each sub-batch (other results).
        on_shape_change: ``"replan"`` for batches of another shape, or ``"error"``.
        split_batch: ``split_batch(batch, sub_batch) -> parts``, for batches that cannot be cut by their first
            dimension.
        loss_weight: ``loss_weight(part)`` counts what a part's loss is a mean over, where a probe cannot see it.
        dry_run: ``"auto"`` calls ``training_step`` more often than training does, unless the budget is many times what
            a step needs, and says so before. Changes to what is neither tensor nor module, such as an environment or a
            replay buffer, are not undone. ``"off"`` never does: the first step of each shape runs with everything
            offloaded, and what it saved and held decides what stays on the device from then on. Batches then stay
            whole, and a budget that is too small for that ends training after the first step.
        plan: a file that :meth:`save_plan` or ``retime plan --save`` wrote. If its plans do not
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
        batchnorm: BatchNormChoice = "offload",
        on_shape_change: OnShapeChange = "replan",
        split_batch: Split | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        dry_run: DryRuns = "auto",
        plan: str | os.PathLike[str] | None = None,
        device: str | int | torch.device | None = None,
        accelerator: Accelerator | str | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            budget,
            host,
            BudgetOptions(batchnorm, on_shape_change, split_batch or cut, loss_weight, dry_run, plan),
            device=device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def _make_step(self, module: LightningModule, options: BudgetOptions) -> BudgetedStep:
        return BudgetedStep(module, self.optimizers, *self._memory(), options)
