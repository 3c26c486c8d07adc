"""Budgeted steps under DistributedDataParallel (moDNN, section 6).

Each rank plans for its own device and its own batches: nothing that a rank tries out goes through DDP's forward pass.
How many parts a batch has may differ by rank, since only the last of them reduces gradients; before each batch the
ranks tell one another in what way it runs, and whether one of them has failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp import RankAgreement
from retime.foundations.torch_private import joins_uneven_inputs
from retime.mechanisms.memory_budget.data_parallel.alone import CollectiveError, alone
from retime.mechanisms.memory_budget.data_parallel.ddp_memory import (
    NewBuckets,
    bucket_bytes,
    buckets_of,
    reduction_bytes,
)
from retime.mechanisms.memory_budget.data_parallel.reduce_last import ReduceLast
from retime.mechanisms.memory_budget.host import HostTier
from retime.mechanisms.memory_budget.planning import PlannedShape, Step
from retime.mechanisms.memory_budget.step import (
    AnotherPath,
    BudgetedStep,
    NoLossError,
    SubBatches,
    Way,
    warn_of_no_plan,
)

__all__ = ["SETTING_UP", "BudgetedDataParallelStep"]

SETTING_UP = "set up its memory budget"
"""What ranks do that make a :class:`BudgetedDataParallelStep`, for errors."""
_PLANNING = "plan its batch"


class BudgetedDataParallelStep(BudgetedStep):
    """A :class:`BudgetedStep` on each rank; all ranks call it for the same batches.

    Gradients are reduced once a step, while the last sub-batch runs; the buckets that DDP keeps for that count.
    :class:`~retime.mechanisms.cpu_accumulation.BucketReduction` lets a reducer sum them, in host memory for example.

    Args:
        model: the wrapped model; ``step`` calls it as ever.
        optimizers, budget_bytes, host: of this rank; as for :class:`BudgetedStep`.
        agreement: how the ranks talk; None makes one. It is closed by :meth:`remove`.
        options: as for :class:`BudgetedStep`.

    Raises:
        ValueError: an optimizer that communicates, or SyncBatchNorm with a choice that takes parts of a batch.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        budget_bytes: int | str,
        host: HostTier,
        *,
        agreement: RankAgreement | None = None,
        **options: Any,
    ) -> None:
        synced = _synced(model)
        if synced and options.get("batchnorm", "offload") != "offload":
            raise ValueError(
                f"SyncBatchNorm takes its statistics over the batches of all ranks ({synced[0]}), so no part of one "
                f"can stand alone: use batchnorm='offload', or BatchNorm with batchnorm={options['batchnorm']!r}"
            )
        if any(_communicates(optimizer) for optimizer in optimizers):
            raise ValueError(
                "ZeroRedundancyOptimizer's step communicates, so a rank cannot plan its memory alone: use the "
                "optimizer itself"
            )
        reduction = reduction_bytes(model)
        super().__init__(
            model.module,
            optimizers,
            budget_bytes,
            host,
            buckets=buckets_of(model),
            reduction_bytes=reduction,
            hidden_bytes=reduction + bucket_bytes(model),
            whole_because=_why_whole(model, synced),
            may_stop=False,  # the other ranks would wait for this one's gradients
            **options,
        )
        self._new_buckets = NewBuckets(model)
        self._wrapped = model
        self._reduction = ReduceLast(model)
        self._agreement = agreement or RankAgreement()
        self._collective: CollectiveError | None = None
        self._watched = False
        self._way = Way.PLAIN
        self._late: Exception | None = None

    def plan(self, step: Step, batch: Any) -> PlannedShape:
        """What is decided on this rank."""
        return super().plan(self._guarded(step), batch)

    def prepare(self, step: Step, batch: Any) -> SubBatches:
        return self._begun(super().prepare(self._guarded(step), batch))

    def choose(self, step: Step, batch: Any) -> Way:
        """In what way this batch runs: on this rank or, if they have a harder one, on another.

        Raises:
            BudgetError: a rank refuses its budget.
            RuntimeError: a rank could not plan.
            ValueError: inside of the wrapper's ``join()``.
        """
        self._refuse_join()
        self._reduction.end()
        guarded = self._guarded(step)
        if self._batches.stopped:
            self._begun(self._anew(guarded, batch))
            return self._way
        self._make_room(batch)
        no_loss: list[NoLossError] = []

        def decide() -> Way:
            late, self._late = self._late, None
            if late is not None:
                raise late
            try:
                return super(BudgetedDataParallelStep, self).choose(guarded, batch)
            except NoLossError as error:
                no_loss.append(error)
                return Way.PLAIN

        way = self._way = Way(int(self._agreement.largest(decide, _PLANNING)))
        if no_loss:
            raise no_loss[0]
        if way is not Way.PLAIN:
            self._begun(self.parts or super().prepare(guarded, batch))
        return way

    def _anew(self, step: Step, batch: Any) -> SubBatches:
        """A batch that was stopped begins again, on this rank alone: the others may be waiting for its gradients.

        Where there is no plan for it any more it runs whole, and all ranks end before the next batch.
        """
        self._reduction.sent_buffers()
        try:
            return super().prepare(step, batch)
        except Exception as error:  # the next batch tells the others
            warn_of_no_plan(error)
            self._late = error
            return self._batches.prepare_whole(step, self._record(batch))

    def begin(self, step: Step, batch: Any) -> Any:
        with suppress(AnotherPath):
            self.choose(step, batch)
            return (self.parts or self.prepare(step, batch)).forward(0)
        self.choose(step, batch)  # behind an `except`, whose traceback would hold the stopped pass's activations
        return (self.parts or self.prepare(step, batch)).forward(0)

    def ended(self) -> None:
        self._reduction.end()  # a batch that failed must not keep later steps from reducing

    def remove(self) -> None:
        self._reduction.end()
        self._agreement.close()
        super().remove()

    @contextmanager
    def offloading(self, step: Step, batch: Any) -> Iterator[None]:
        self._refuse_join()
        self._agreement.largest(lambda: bool(self.plan(step, batch).choice.plan.offload), _PLANNING)
        with super().offloading(self._guarded(step), batch):
            yield

    def _refuse_join(self) -> None:
        if joins_uneven_inputs(self._wrapped):
            raise ValueError(
                "under a memory budget ranks agree on each batch, and one that has none left in model.join() answers "
                "nobody: leave join() out, and give all ranks as many batches (DistributedSampler(drop_last=True))"
            )

    def _make_room(self, batch: Any) -> None:
        """Buckets that were made while the pool was there are the pool's."""
        reduction_bytes = self._planner.reduction_bytes
        if self._new_buckets.since and self.hidden_bytes > reduction_bytes:
            self._plans.hide(reduction_bytes, batch)

    def _begun(self, parts: SubBatches) -> SubBatches:
        self._reduction.begin(parts.weights)
        return parts

    def _guarded(self, step: Step) -> Step:
        self._collective = None
        return partial(self._run, step)

    def _run(self, step: Step, part: Any) -> Any:
        """By itself while it is tried out; otherwise the step reduces gradients with its last part."""
        if not self.planning:
            with self._reduction.part(), self._new_buckets.watched():
                return step(part)
        if self._collective is not None:
            raise self._collective
        try:
            with alone(self._wrapped, watch=not self._watched):
                output = step(part)
        except CollectiveError as error:  # dry runs take errors for their own, so it has to come again
            self._collective = error
            raise
        self._watched = True
        return output


def _communicates(optimizer: torch.optim.Optimizer) -> bool:
    """By name: importing torch's distributed optimizers takes long, and warns."""
    return any(known.__name__ == "ZeroRedundancyOptimizer" for known in type(optimizer).__mro__)


def _synced(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.SyncBatchNorm)]


def _why_whole(model: DistributedDataParallel, synced: list[str]) -> str:
    if model.static_graph:
        return "static_graph=True promises DDP that all backward passes are alike; leave it out, or offload only"
    if synced:
        return f"SyncBatchNorm takes its statistics over the whole batches of all ranks: {synced[0]}; offload only"
    return ""
