"""Training inside a byte budget on several devices as a Lightning strategy (moDNN, Chen et al. 2019, section 6)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.ddp import RankAgreement
from retime.foundations.parts import BatchNormChoice, Split
from retime.foundations.parts import split_batch as cut
from retime.mechanisms.cpu_accumulation import BucketReduction
from retime.mechanisms.memory_budget import (
    SETTING_UP,
    BudgetedDataParallelStep,
    BudgetedStep,
    BudgetOptions,
    DryRuns,
    OnShapeChange,
)
from retime.strategies.support.base import DDPArguments, HostReductionMixin, ReduceOn, refuse_users_hook
from retime.strategies.support.budgeted_steps import Budgeted
from retime.strategies.support.lightning_private import timeout_of


class MemoryBudgetDDPStrategy(HostReductionMixin, Budgeted, DDPArguments):
    """``ddp`` in which no rank uses more of its device's memory than a number of bytes.

    Each rank plans for its own batches, as under :class:`MemoryBudgetStrategy`. DDP's gradient
    buckets count (``gradient_as_bucket_view=True`` saves them if batches stay whole), and on a CPU what gloo's sums
    allocate; other objects of DDP and gloo, some MiB, do not. Gradients
    are reduced once a step, while its last sub-batch runs. If a rank's budget is too small, all ranks raise the error.
    Offload-only plans are bit-identical to ``ddp``; sub-batches agree with it up to rounding.

    Before each batch the ranks exchange one small message on the CPU. Batches stay whole, and are only offloaded, with
    SyncBatchNorm and with ``static_graph=True``. Parameters that not every sub-batch uses need
    ``find_unused_parameters=True``, as the last sub-batch alone decides what DDP waits for. Refused are a
    ``training_step`` that calls collectives itself (``self.log(..., sync_dist=True)`` is allowed) and
    ZeroRedundancyOptimizer.

    Gradients are reduced by DDP's backend. On CUDA that is NCCL, from device to device; if devices have no fast link,
    ``reduce_on="host"`` lets the processors sum them in host memory, bucket by bucket during the
    backward pass (the paper's section 6.2). What a custom communication hook allocates is not counted.

    Args:
        budget: of each rank: bytes, ``"8GiB"``, or ``"90%"`` of its device; on a CPU the ranks of a machine share the
            percentage.
        reduce_on: ``"device"`` or ``"host"``; the latter takes the place of ``ddp_comm_hook``.
        host: this and the next six are :class:`MemoryBudgetStrategy`'s.

    All other arguments are those of :class:`lightning.pytorch.strategies.DDPStrategy` and of the
    ``DistributedDataParallel`` that it makes, whose further ones are taken too.
    """

    strategy_name = "memory_budget_ddp"

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
        reduce_on: ReduceOn = "device",
        **ddp: Any,
    ) -> None:
        options = BudgetOptions(batchnorm, on_shape_change, split_batch or cut, loss_weight, dry_run, plan)
        super().__init__(budget, host, options, **ddp)
        if reduce_on == "host":
            refuse_users_hook(Mechanism.HOST_REDUCTION, ddp)
        self.reduce_on = reduce_on

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Mechanisms that this strategy brings along."""
        return (*super().mechanisms, Mechanism.HOST_REDUCTION) if self.reduce_on == "host" else super().mechanisms

    def _make_step(self, module: LightningModule, options: BudgetOptions) -> BudgetedStep:
        self.end_reduction()
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        reducer = self.make_reducer(model)
        if reducer is not None:
            self._reduction = BucketReduction(model, reducer)
        agreement = RankAgreement(timeout_of(self))

        def make() -> BudgetedStep:
            memory = self._memory(self.num_processes)
            return BudgetedDataParallelStep(model, self.optimizers, *memory, options, agreement=agreement)

        return agreement.each_makes(make, BudgetedStep.remove, SETTING_UP)

    def on_exception(self, exception: BaseException) -> None:
        unused = "Expected to have finished reduction" in str(exception)
        super().on_exception(exception)
        if unused:
            exception.add_note(
                "retime: gradients are reduced with the last sub-batch of a step, so parameters that only earlier ones "
                "use count as unused; find_unused_parameters=True lets DDP find them"
            )
