"""Budgeted steps under DistributedDataParallel (moDNN, section 6).

Each rank plans for its own device and its own batches: nothing that a rank tries out goes through DDP's forward pass.
How many parts a batch has may differ by rank, since only the last of them reduces gradients; before each batch the
ranks tell one another in what way it runs, and whether one of them has failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.cpu_pool import trim_heap
from retime.foundations.ddp import RankAgreement
from retime.foundations.messages import warn_no_effect
from retime.foundations.patching import replaced_attributes
from retime.foundations.storages import strided_bytes
from retime.foundations.torch_private.distributed import COLLECTIVE_NAMESPACES, has_rebuilt_buckets, joins_uneven_inputs
from retime.foundations.torch_private.engine import TorchDispatchMode
from retime.foundations.torch_private.nn_and_optim import BatchNormBase
from retime.mechanisms.memory_budget.offload import HostTier
from retime.mechanisms.memory_budget.planner import BudgetOptions, Step
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.step import BudgetedStep, ExecutionMode, NoLossError
from retime.mechanisms.memory_budget.sub_batches import SubBatches

# A rank tries something out by itself: the model's step without the other ranks, who may be doing something else.


class CollectiveError(RuntimeError):
    """A step that a rank runs by itself asked for an answer of the other ranks."""


@contextmanager
def bypass_ddp(model: DistributedDataParallel, *, watch: bool = True) -> Iterator[None]:
    """While open, calls of ``model`` reach the bare module: none of DDP's hooks fires, no buffer is sent.

    SyncBatchNorm layers take the statistics of this rank.

    Args:
        watch: refuse collectives of the step's own; looking at each operation takes time.

    Raises:
        CollectiveError: there is one.
    """
    synced = [layer for layer in model.modules() if isinstance(layer, nn.SyncBatchNorm)]
    with ExitStack() as around:
        around.enter_context(replaced_attributes(model, forward=model.module.__call__))
        for layer in synced:
            around.enter_context(replaced_attributes(layer, forward=partial(BatchNormBase.forward, layer)))
        if watch:
            around.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
        yield


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE_NAMESPACES:
            raise CollectiveError(
                f"the step calls {func.__name__.partition('.')[0].strip('_')} on all ranks, so one rank cannot plan "
                "its memory alone: log with self.log(..., sync_dist=True) or a torchmetrics object, or move the "
                "collective out of the step"
            )
        return func(*args, **(kwargs or {}))


# What DistributedDataParallel holds beside a model and its gradients: buckets, and what sums of them take.

_FIRST_BUCKET_BYTES = 2**20  # DDP's own: the first bucket is small, so that the network starts early
_SEGMENT_BYTES = 2**20  # the largest piece that gloo sends
_THREADS = 2  # of gloo, in a process group


def buckets_of(model: nn.Module | None) -> Literal["", "beside", "gradients"]:
    """Kind of buckets that hold memory beside gradients; see :class:`~retime.mechanisms.memory_budget.TrainingStep`."""
    if not isinstance(model, DistributedDataParallel):
        return ""
    return "gradients" if model.gradient_as_bucket_view else "beside"


def bucket_bytes(model: nn.Module | None) -> int:
    """Return the bytes of all gradient buckets."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    return strided_bytes(one for one in model.parameters() if one.requires_grad)


def reduction_bytes(model: nn.Module | None) -> int:
    """Bytes that reductions of gradients allocate in this process's memory; see :func:`gloo_bytes`.

    NCCL's buffers are none of torch's, and count for no budget.
    """
    if not isinstance(model, DistributedDataParallel) or next(model.parameters()).device.type != "cpu":
        return 0
    if "gloo" not in dist.get_backend(model.process_group):
        return 0
    return gloo_bytes(bucket_bytes(model), int(model.bucket_bytes_cap), dist.get_world_size(model.process_group))


def gloo_bytes(gradient_bytes: int, cap_bytes: int, ranks: int) -> int:
    """Bytes that gloo allocates to sum gradients: two pieces of the largest bucket for each of its threads.

    It sums in a ring: each rank's share of a bucket in pieces of at most 1 MiB, two of which are under way. Each of
    its threads has a heap of its own, which keeps what the largest bucket took.

    Args:
        gradient_bytes: of all trained parameters.
        cap_bytes: DDP's ``bucket_cap_mb``, in bytes.
        ranks: that sum them.
    """
    first = min(_FIRST_BUCKET_BYTES, cap_bytes)
    largest = max(min(gradient_bytes, first), min(gradient_bytes - first, cap_bytes))  # about: they end at parameters
    return _THREADS * 2 * _piece_bytes(largest, ranks) if ranks > 1 else 0


class NewBuckets:
    """Watches for the buckets that DDP makes after its first step, in the order in which gradients were ready.

    The memory of the first ones is given back to the system before the forward pass begins.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._at_first = self.are_rebuilt = has_rebuilt_buckets(model)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around calls of the model."""
        with nullcontext() if self.are_rebuilt else self._model.module.register_forward_pre_hook(self._look):
            yield

    @property
    def since(self) -> bool:
        """They were made since this object was."""
        return self.are_rebuilt and not self._at_first

    def _look(self, module: nn.Module, inputs: object) -> None:
        if not self.are_rebuilt and has_rebuilt_buckets(self._model):
            self.are_rebuilt = True
            trim_heap()


def _piece_bytes(nbytes: int, ranks: int) -> int:
    pieces = max(-(-nbytes // _SEGMENT_BYTES), 2 * ranks)
    return -(-nbytes // (-(-pieces // ranks) * ranks))


# Gradients of a batch in parts leave once: with the backward pass of its last part (moDNN, section 6.2).


class ReduceLast:
    """Switches the reductions of a DistributedDataParallel model on for one part of each batch.

    ::

        reduce.begin(weights)
        for part, weight in zip(parts, weights):
            with reduce.part():
                loss = step(model, part)
            if weight:
                (loss * weight).backward()

    Inside of ``model.no_sync()`` no part reduces. Buffers are sent once a batch, as without parts.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._wanted: bool | None = None
        self._part = self._last = self._parts = 0

    def begin(self, weights: Sequence[float]) -> None:
        """A batch begins.

        Args:
            weights: of its parts. Those of weight 0 have no backward pass, so they cannot be the one that reduces.
        """
        self.end()
        self._wanted = self._model.require_backward_grad_sync
        self._part, self._parts = -1, len(weights)
        self._last = max(index for index, weight in enumerate(weights) if weight)

    @contextmanager
    def part(self) -> Iterator[None]:
        """Around the forward pass of the next part; the batch is over with that of the last one, or when one fails."""
        if self._wanted is None:
            yield
            return
        self._part += 1
        self._model.require_backward_grad_sync = self._wanted and self._part == self._last
        over = self._part > self._last  # DDP's forward pass would begin the next batch: other ranks have no such part
        try:
            with bypass_ddp(self._model, watch=False) if over else nullcontext():
                yield
        except BaseException:
            self.end()
            raise
        if self._part == self._parts - 1:  # now, while the caller's no_sync() is still open
            self.end()

    def sent_buffers(self) -> None:
        """The batch begins again, after its first part: other ranks do not send their buffers a second time."""
        if self._last == 0:  # the forward pass of the part that reduces would send those of the next batch
            self._model.require_forward_param_sync = False

    def end(self) -> None:
        """The batch is over, or will not be finished."""
        if self._wanted is None:
            return
        self._model.require_backward_grad_sync = self._wanted
        self._wanted = None


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
        options: as for :class:`BudgetedStep`, and so are others given by name.
        agreement: how the ranks talk; None makes one. It is closed by :meth:`remove`.

    Raises:
        ValueError: an optimizer that communicates, or SyncBatchNorm with a choice that takes parts of a batch.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        budget_bytes: int | str,
        host: HostTier,
        options: BudgetOptions | None = None,
        *,
        agreement: RankAgreement | None = None,
        **named: Any,
    ) -> None:
        options = replace(options or BudgetOptions(), **named)
        synced = [name for name, layer in model.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
        batchnorm = options.batchnorm
        if synced and batchnorm != "offload":
            raise ValueError(
                f"SyncBatchNorm takes its statistics over the batches of all ranks ({synced[0]}), so no part of one "
                f"can stand alone: use batchnorm='offload', or BatchNorm with batchnorm={batchnorm!r}"
            )
        kinds = {kind.__name__ for optimizer in optimizers for kind in type(optimizer).__mro__}
        if "ZeroRedundancyOptimizer" in kinds:  # by its name: importing torch's distributed optimizers takes long
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
            options,
            buckets=buckets_of(model),
            reduction_bytes=reduction,
            hidden_bytes=reduction + bucket_bytes(model),
            whole_because=_why_whole(model, synced) or options.whole_because,
            may_stop=False,  # the other ranks would wait for this one's gradients
        )
        self._new_buckets = NewBuckets(model)
        self._wrapped = model
        self._reduction = ReduceLast(model)
        self._agreement = agreement or RankAgreement()
        self._collective: CollectiveError | None = None
        self._watched = False
        self._way = ExecutionMode.PLAIN
        self._late: Exception | None = None

    def plan(self, step: Step, batch: Any) -> PlannedShape:
        """Plan that is decided on this rank."""
        return super().plan(self._guarded(step), batch)

    def prepare(self, step: Step, batch: Any) -> SubBatches:
        return self._begun(super().prepare(self._guarded(step), batch))

    def choose(self, step: Step, batch: Any) -> ExecutionMode:
        """Choose the way in which this batch runs: on this rank or, if they have a harder one, on another.

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
        reduction = self._planner.reduction_bytes
        if self._new_buckets.since and self.hidden_bytes > reduction:
            self._plans.hide(reduction, batch)  # buckets that were made while the pool was there are the pool's
        no_loss: list[NoLossError] = []

        def decide() -> ExecutionMode:
            late, self._late = self._late, None
            if late is not None:
                raise late
            try:
                return super(BudgetedDataParallelStep, self).choose(guarded, batch)
            except NoLossError as error:
                no_loss.append(error)
                return ExecutionMode.PLAIN

        way = self._way = ExecutionMode(int(self._agreement.largest(decide, _PLANNING)))
        if no_loss:
            raise no_loss[0]
        if way is not ExecutionMode.PLAIN:
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
            warn_no_effect(
                "this batch computes something else than the planned batch, and has no plan on this rank. As the "
                f"other ranks wait for its gradients, it runs whole, outside of its budget; training ends before the "
                f"next: {error}",
                every_rank=True,
            )
            self._late = error
            return self._batches.prepare_whole(step, self._record(batch))

    def _prepared(self, step: Step, batch: Any) -> SubBatches:
        self.choose(step, batch)
        return self.parts or self.prepare(step, batch)

    def ended(self) -> None:
        self._reduction.end()  # a batch that failed must not keep later steps from reducing

    def remove(self) -> None:
        self._reduction.end()
        self._agreement.close()
        super().remove()

    @contextmanager
    def offloading(self, step: Step, batch: Any) -> Iterator[None]:
        self._refuse_join()
        if self._planner.options.dry_run == "off":
            raise ValueError(
                "on several ranks a plan that only offloads is made by dry runs, which call the step more often than "
                "training does: give dry_run='auto' if it neither counts nor logs"
            )
        self._agreement.largest(lambda: bool(self.plan(step, batch).choice.plan.offload), _PLANNING)
        with super().offloading(self._guarded(step), batch):
            yield

    def _refuse_join(self) -> None:
        if joins_uneven_inputs(self._wrapped):
            raise ValueError(
                "under a memory budget ranks agree on each batch, and one that has none left in model.join() answers "
                "nobody: leave join() out, and give all ranks as many batches (DistributedSampler(drop_last=True))"
            )

    def _begun(self, parts: SubBatches) -> SubBatches:
        self._reduction.begin(parts.weights)
        return parts

    def _guarded(self, step: Step) -> Step:
        self._collective = None
        return partial(self._run, step)

    def _run(self, step: Step, part: Any) -> Any:
        """Run a part by itself while it is tried out; otherwise the step reduces gradients with its last part."""
        if not self.planning:
            with self._reduction.part(), self._new_buckets.watched():
                return step(part)
        if self._collective is not None:
            raise self._collective
        try:
            with bypass_ddp(self._wrapped, watch=not self._watched):
                output = step(part)
        except CollectiveError as error:  # dry runs take errors for their own, so it has to come again
            self._collective = error
            raise
        self._watched = True
        return output


def _why_whole(model: DistributedDataParallel, synced: list[str]) -> str:
    if model.static_graph:
        return "static_graph=True promises DDP that all backward passes are alike; leave it out, or offload only"
    if synced:
        return f"SyncBatchNorm takes its statistics over the whole batches of all ranks: {synced[0]}; offload only"
    return ""
