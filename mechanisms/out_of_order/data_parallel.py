"""Out-of-order data parallel: communication hides behind weight gradients and behind the next forward pass.

Oh et al. 2022, section 5.1. DistributedDataParallel and its buckets stay the engine. Its communication hook starts each
bucket's all-reduce and reports it as done; who really needs a gradient waits for it (``reductions``). The weight
gradients of the first k blocks run last, in forward order, and each block's gradients leave as soon as they are there:
the next forward pass needs them first.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import Timeout, checked
from retime.foundations.ddp import (
    BucketMap,
    KeptGradients,
    OwnGroupsReducer,
    PendingGradient,
    RankProcesses,
    Reducer,
    Reduction,
    Reductions,
    Region,
    at_end_of_backward,
    comm_hook_of,
    scale,
    sparse_layer,
)
from retime.foundations.lazy_updates import parameters_of, pending_of
from retime.foundations.messages import Report, each_because, parse_bytes, show_bytes, warn_no_effect
from retime.foundations.torch_private.distributed import GradBucket, has_rebuilt_buckets, join_reader
from retime.foundations.weight_gradients import Block, WeightGradientDeferral
from retime.mechanisms.fusion import ForwardFusion, FusionReport
from retime.mechanisms.out_of_order.k_search import K, KChoice, SavedK, extra_bytes

# The cross-iteration wait: each parameter is updated when the next forward pass reads it and its gradient is there.


class CrossIterationUpdates(ForwardFusion):
    """Forward fusion whose buckets are the all-reduces on their way, each with a wait in front of its update.

    Args:
        optimizer: whose updates wait.
        model: of its parameters.
        reduction_of: the all-reduce that carries a parameter's gradient, if one is on its way.
        on_remove: called with this, and once, when it is removed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        reduction_of: Callable[[Tensor], Reduction | None],
        on_remove: "Callable[[CrossIterationUpdates], None]",
    ) -> None:
        super().__init__(optimizer, model, gradients_in_buckets=True)
        self._reduction_of = reduction_of
        self._on_remove = on_remove

    def remove(self) -> None:
        """Bring all parameters up to date and give the optimizer its own methods back."""
        if self.is_removed:
            return
        try:
            super().remove()
        finally:
            self._on_remove(self)

    def _settle_others(self) -> None:
        for parameter in parameters_of(self.optimizer):
            pending = pending_of(parameter)
            if pending is not None and not isinstance(pending, PendingGradient):
                pending.settle()

    def _waiting_buckets(self, parameters: list[Tensor]) -> list[tuple[list[Tensor], Callable[[], None] | None]]:
        buckets: list[tuple[list[Tensor], Callable[[], None] | None]] = []
        arrived: list[Tensor] = []
        carried: dict[Reduction, list[Tensor]] = {}
        for parameter in parameters:
            reduction = self._reduction_of(parameter)
            if reduction is not None and isinstance(pending_of(parameter), PendingGradient):
                carried.setdefault(reduction, []).append(parameter)
            else:
                arrived.append(parameter)
        for reduction, mine in carried.items():
            watch = pending_of(mine[0])
            assert watch is not None
            watch.release()
            rest = [p for p in watch.parameters if p not in set(mine)]
            if rest:
                PendingGradient(rest, reduction.wait)
            buckets.append((mine, reduction.wait))
        return buckets + super()._waiting_buckets(arrived)


# Which wrapped models can be re-ordered.


def check_model(model: DistributedDataParallel) -> None:
    """Refuse what cannot be re-ordered, before anything is changed.

    Raises:
        ValueError: with what to do.
    """
    backend = dist.get_backend(model.process_group)
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend {backend!r} is not supported: use gloo or nccl")
    if dist.get_world_size(model.process_group) < 2:
        return  # it does nothing then
    if not model.gradient_as_bucket_view:
        raise ValueError("build the model with DistributedDataParallel(..., gradient_as_bucket_view=True)")
    if model.mixed_precision is not None:
        raise ValueError("DistributedDataParallel(mixed_precision=...) is not supported: use autocast instead")
    layer = sparse_layer(model.module)
    if layer is not None:
        raise ValueError(f"the sparse gradients of {layer!r} cannot go through a communication hook: use sparse=False")


# Which gradients leave when, if the weight gradients of the first k blocks are computed last.

SMALLEST_MESSAGE_BYTES = 1024 * 1024
"""Gradients of neighbouring blocks are sent together until they are this large."""


class BucketPlan:
    """A cut through the wrapper's buckets, as it will keep them, for one k.

    Args:
        blocks: the first k.

    Attributes:
        first_bucket: from which on gradients leave by this plan, not when the wrapper finds the bucket full; None:
            those of all buckets leave then.
        others: sent before the first weight gradient that waited: they share buckets with those that wait.
        behind: what leaves behind a block's weight gradients, by the block's name.
    """

    def __init__(self, buckets: BucketMap, blocks: list[Block]) -> None:
        mine = [[p for layer in block.layers for p in layer.parameters] for block in blocks]
        chosen = {p for parameters in mine for p in parameters}
        self.first_bucket = buckets.first_bucket_of(chosen)
        self.others: list[Region] = []
        self.behind: dict[str, list[Region]] = {}
        if self.first_bucket is None:
            return
        self.others = buckets.regions(p for p in buckets.parameters_from(self.first_bucket) if p not in chosen)
        gathered: list[Tensor] = []
        sent: set[Tensor] = set()
        for block, parameters in zip(blocks, mine, strict=True):
            gathered += [p for p in parameters if p not in sent]
            sent.update(parameters)
            size = sum(p.numel() * p.element_size() for p in gathered)
            if gathered and (size >= SMALLEST_MESSAGE_BYTES or block is blocks[-1]):
                self.behind[block.name] = buckets.regions(gathered)
                gathered = []


# When a backward pass starts its all-reduces: buckets as they fill, gradients that waited as the plan says.


class BucketScheduler:
    """Learns the wrapper's buckets, and begins each all-reduce once.

    Args:
        model: whose buckets are sent.
        reducer: sums; it stays its owner's.
        divide: whether gradients are divided by the number of ranks, or multiplied by its rounded reciprocal.
        check_ranks: raises an error if another rank is gone, which gloo need not notice.

    Attributes:
        buckets: of the wrapper, as far as they are known.
        reductions: that were begun.
        plan: what leaves in our own order; None: everything leaves when its bucket is full.
        never_rebuilds: whether the wrapper keeps the buckets that it was built with.
    """

    def __init__(
        self, model: DistributedDataParallel, reducer: Reducer, *, divide: bool, check_ranks: Callable[[], None]
    ) -> None:
        self._model = model
        self.buckets = BucketMap()
        ranks = dist.get_world_size(model.process_group)
        self.reductions = Reductions(reducer, ranks, divide=divide, check_ranks=check_ranks)
        self.never_rebuilds = model.find_unused_parameters and not model.static_graph
        self.plan: BucketPlan | None = None

    @property
    def first_bucket(self) -> int | None:
        """The first of the buckets that leave in our own order, if any do."""
        return None if self.plan is None else self.plan.first_bucket

    def start_full(self, bucket: GradBucket, *, defers: bool) -> None:
        """Begin the all-reduce of a bucket that the wrapper has found full, unless it leaves in our own order.

        Args:
            bucket: of the running backward pass.
            defers: whether weight gradients wait in this pass.

        Raises:
            RuntimeError: the wrapper has built its buckets anew, and gradients were sent from the old ones.
        """
        first = self.first_bucket
        ours = defers and first is not None and bucket.index() >= first
        final = self.buckets.is_steady or has_rebuilt_buckets(self._model) or self.never_rebuilds
        if not self.buckets.learn(bucket, final=final) and ours:
            raise RuntimeError(
                "DistributedDataParallel built its buckets anew in the middle of training, and gradients were sent "
                "from the old ones: use k=0 for this model"
            )
        if not ours:
            self.reductions.start(bucket.index(), bucket.parameters(), bucket.buffer(), urgent=False)

    def start_behind(self, block: Block | None) -> None:
        """Begin what leaves behind this block's weight gradients; None: before the first of those that waited."""
        if self.plan is None:
            return
        for region in self.plan.others if block is None else self.plan.behind.get(block.name, []):
            self.reductions.start(region.place, region.parameters, region.values, urgent=block is not None)


# What out-of-order backprop really did.


@dataclass
class OutOfOrderReport(Report):
    """Counts since the mechanism was attached; sizes in bytes, times in seconds."""

    blocks: int = 0
    """L, the blocks found in forward order; 0 before the first backward pass has been watched."""
    k: int = 0
    """Blocks whose weight gradients run last, in forward order (Oh et al. 2022, algorithm 2)."""
    bucket_bytes: int = 0
    """Up to which size gradients are sent together (``bucket_cap_mb``)."""
    steps: int = 0
    """Backward passes with gradient synchronisation."""
    deferred_gradients: int = 0
    """Weight gradients (one a layer and step) that were computed after all output gradients."""
    buffered_gradients: int = 0
    """Weight gradients that one kernel computes together with the output gradient, and that were sent later."""
    layers_in_order: dict[str, int] = field(default_factory=dict)
    """Layers that stay in the conventional order, by reason."""
    buffered_layers: dict[str, int] = field(default_factory=dict)
    """Layers whose weight gradients are computed in order and sent later, by reason."""
    fused_updates: int = 0
    """Parameter updates that waited for their own gradients only, in the next forward pass or at another read."""
    late_updates: int = 0
    """Parameter updates that ran in ``optimizer.step()`` all the same."""
    early_waits: int = 0
    """Steps in which something read a gradient between backward and ``optimizer.step()``, and so waited for it."""
    plain_steps: dict[str, int] = field(default_factory=dict)
    """Steps or optimizers without cross-iteration wait, by reason."""
    in_order: dict[str, int] = field(default_factory=dict)
    """Backward passes whose weight gradients all ran in the conventional order, by reason."""
    searched: dict[int, float] = field(default_factory=dict)
    """Seconds a step by k with ``k="auto"``, in the order in which they were measured."""
    search_steps: int = 0
    """Steps from the first one until the search had ended, or until now."""
    extra_bytes: int = 0
    """Predicted growth of the memory peak at this k (algorithm 2, line 1)."""

    def what_was_done(self) -> list[str]:
        if not self.steps:
            return ["out-of-order backprop: no step with gradient synchronisation yet"]
        return [
            f"out-of-order backprop: k={self.k} of {self.blocks} blocks, {self.deferred_gradients} weight gradients "
            f"deferred and {self.buffered_gradients} buffered over {self.steps} steps",
            f"{self.fused_updates} updates waited for their own gradients only",
        ]

    def what_stayed_plain(self) -> list[str]:
        counts = {
            f"{self.late_updates} updates ran in optimizer.step()": self.late_updates,
            f"{self.early_waits} steps waited, as gradients were read before optimizer.step()": self.early_waits,
        }
        return [
            *(text for text, count in counts.items() if count),
            *each_because(self.layers_in_order, "layers in order"),
            *each_because(self.buffered_layers, "layers whose gradients are computed in order and sent later"),
            *each_because(self.plain_steps, "steps without cross-iteration wait"),
            *each_because(self.in_order, "backward passes in order"),
        ]

    def what_was_measured(self) -> list[str]:
        times = ", ".join(f"k={k}: {seconds * 1e3:.1f} ms" for k, seconds in sorted(self.searched.items()))
        texts = {
            f"steps of the search, {self.search_steps} in all: {times}": times,
            f"buckets of {self.bucket_bytes / 2**20:g} MiB": self.bucket_bytes,
            f"predicted growth of the memory peak: {show_bytes(self.extra_bytes)}": self.extra_bytes,
        }
        return [text for text, is_there in texts.items() if is_there]


# The all-reduces of the last backward pass, and who waits for them.


class InFlightReductions:
    """Gradients that are on their way between two backward passes.

    Args:
        report: counts the steps in which a gradient was read before the next forward pass.
        cross_iteration: whether whoever reads a gradient waits for it; False: the end of the backward pass does.

    Attributes:
        carrying: the all-reduce that carries a parameter's gradient, of those on their way.
    """

    def __init__(self, report: OutOfOrderReport, *, cross_iteration: bool) -> None:
        self._report = report
        self._cross_iteration = cross_iteration
        self.carrying: dict[Tensor, Reduction] = {}
        self._read_early = False

    def expect(self, reductions: Iterable[Reduction]) -> None:
        """The backward pass has ended, and these were begun in it."""
        self._read_early = False
        self.carrying.clear()
        for reduction in reductions:
            if self._cross_iteration:
                reduction.watch(self._on_early_read)
            else:
                reduction.wait()
            self.carrying.update(dict.fromkeys(reduction.parameters, reduction))

    def settle(self) -> None:
        """Wait for all of them."""
        for pending in [pending_of(parameter) for parameter in self.carrying]:
            if isinstance(pending, PendingGradient):
                pending.settle()

    def release(self) -> None:
        """Let parameters wait for nothing more, whether or not it has arrived."""
        for pending in map(pending_of, self.carrying):
            if pending is not None:
                pending.release()
        self.carrying.clear()

    def _on_early_read(self) -> None:
        if not self._read_early:
            self._read_early = True
            self._report.early_waits += 1


UNUSED = "find_unused_parameters=True lets ranks differ in what they compute; use static_graph=True, or leave it out"
ALONE = (
    "with one process there is no communication to hide: use two or more, or 'fused_optimizer_forward' on one device"
)


class OutOfOrderDataParallel:
    """Re-orders the backward pass and the waits of one DistributedDataParallel model.

    In a bare loop::

        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        ooo = OutOfOrderDataParallel(model, optimizer)
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    With one process there is nothing to hide: it does nothing then, with one ``NoEffectWarning``.

    Gradients are bit-identical to the plain wrapper's on two ranks. On more, sums may round differently, as they do
    whenever the buckets of DistributedDataParallel change.

    Args:
        model: built with ``gradient_as_bucket_view=True`` and without a communication hook.
        optimizers: those that step its parameters; more can be given to :meth:`attach`.
        k: how many blocks, in forward order, have their weight gradients computed last; ``"auto"`` measures during the
            first steps (section 5.1) and keeps the fastest. Values above the number of blocks raise once it is known.
        max_memory: bytes, or ``"8GiB"``; bounds k (algorithm 2, lines 1 and 2). None: no bound.
        cross_iteration: let ``optimizer.step()`` return while all-reduces are on their way.
        blocks: names of the modules that k counts; None: repeated blocks, else single layers.
        divide: whether gradients are divided by the number of ranks, as the plain wrapper does with bucket views;
            False: multiplied by the rounded reciprocal, as it does without.
        reducer: sums gradients, and is closed by :meth:`remove`; None: all-reduces on the device, in two groups of
            its own.
        timeout: of these groups; None: torch's default.
        expects_loss: whether the owner calls :meth:`watch` with every loss, which shows more than the model's output.
        known_k: what an earlier run found (``k_choice.to_save()``): ``"auto"`` does not search then, if ranks and
            blocks are as many as they were.

    Attributes:
        model: as given.
        k_choice: which k the next step uses, whether it is searched for, and what a checkpoint keeps of it.
    """

    @checked
    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Optimizer | Iterable[Optimizer] = (),
        *,
        k: K = "auto",
        max_memory: int | str | None = None,
        cross_iteration: bool = True,
        blocks: Iterable[str] | None = None,
        divide: bool = True,
        reducer: Reducer | None = None,
        timeout: Timeout | None = None,
        expects_loss: bool = False,
        known_k: SavedK | None = None,
    ) -> None:
        check_model(model)
        most = None if max_memory is None else parse_bytes("max_memory", max_memory)
        self.model, self._joins = model, join_reader(model)
        self._expects_loss = expects_loss
        self._report = OutOfOrderReport()
        self._deferral = WeightGradientDeferral(
            model.module, blocks=blocks, on_block=self._on_block, on_finished=self._arrange_waits
        )
        self._passes = self._deferral.split.passes
        self._passes.splits = False  # until a forward pass whose gradients are synchronised
        self.k_choice = KChoice(model, self._deferral, k, most, known_k)
        self._divide = divide
        self._kept = KeptGradients([] if divide else model.parameters())  # plain DDP's are bucket views there too
        self._arrivals = InFlightReductions(self._report, cross_iteration=cross_iteration)
        self._updates: list[CrossIterationUpdates] = []
        self._detached = FusionReport("forward")  # counts of those that were removed
        self._chosen_at: int | None = None  # steps there were then: k stays for all forward passes of a step
        self._removed = False
        if dist.get_world_size(model.process_group) < 2:
            warn_no_effect(f"out-of-order data parallel has no effect: {ALONE}")
            self._removed = True
            self._deferral.remove()
            return
        self._slot = comm_hook_of(model)
        self._slot.take(self, "out-of-order data parallel", "remove yours, or use plain DistributedDataParallel")
        self._reducer: Reducer = reducer or OwnGroupsReducer(model.process_group, timeout)
        check_ranks: Callable[[], None] = lambda: None  # noqa: E731
        self._forget_processes = check_ranks
        if dist.get_backend(model.process_group) == "gloo":
            processes = RankProcesses(model.process_group)
            check_ranks, self._forget_processes = processes.check, weakref.finalize(self, processes.close)
        self._sending = BucketScheduler(model, self._reducer, divide=divide, check_ranks=check_ranks)
        if self._sending.never_rebuilds:
            self.k_choice.keep_order(UNUSED)
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]
        for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
            self.attach(optimizer)

    @property
    def k(self) -> int:
        """The number of blocks whose weight gradients run last at the moment."""
        return self._deferral.k

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks in forward order; empty before the first backward pass."""
        return [block.name for block in self._deferral.blocks]

    @checked
    def set_k(self, k: K) -> None:
        """Use this k from the next step on; ``"auto"`` searches again. All ranks must be given the same."""
        self.k_choice.want(k)

    def attach(self, optimizer: Optimizer) -> CrossIterationUpdates:
        """Return a fusion by which this optimizer's updates wait for their own gradients only, until it is removed."""
        updates = CrossIterationUpdates(optimizer, self.model.module, self._arrivals.carrying.get, self._detach)
        self._updates.append(updates)
        return updates

    def _detach(self, updates: CrossIterationUpdates) -> None:
        self._updates.remove(updates)
        self._detached = self._detached.beside(updates.report())

    def watch(self, loss: Any) -> None:
        """Look at the graph under the loss before its first backward pass; otherwise the model's output is taken."""
        if self._deferral.split.first_pass.is_watching and self._passes.splits:
            self._deferral.watch(loss)
            self.k_choice.check_range()

    def flush(self) -> None:
        """Wait for every all-reduce and run every update that is still pending."""
        self._arrivals.settle()
        for updates in self._updates:
            updates.flush()
        self._arrivals.carrying.clear()

    def report(self) -> OutOfOrderReport:
        """Report of what was done so far."""
        report = self._report
        report.blocks, report.k = len(self._deferral.blocks), self.k
        report.bucket_bytes = int(self.model.bucket_bytes_cap)
        report.deferred_gradients = self._passes.deferred_gradients
        report.buffered_gradients = self._passes.buffered_gradients
        report.layers_in_order = self._deferral.split.layers_in_order
        report.buffered_layers = self._deferral.split.buffered_layers
        fused = functools.reduce(FusionReport.beside, (one.report() for one in self._updates), self._detached)
        report.fused_updates, report.late_updates = fused.fused_updates, fused.late_updates
        report.plain_steps = fused.plain_steps
        reason = self.k_choice.order_stays_because
        report.in_order = {reason: report.steps} if reason else {}
        report.extra_bytes = extra_bytes(self._deferral, self.k)
        if self.k_choice.measured is not None:
            report.searched = self.k_choice.measured
            report.search_steps = self.k_choice.search_steps
        return report

    def remove(self, *, failed: bool = False) -> None:
        """Bring all parameters up to date and take the hooks off; gradients are then reduced by the wrapper again.

        Args:
            failed: this rank's training has, which others are told at once where they add up in shared memory.

        Raises:
            RuntimeError: a gradient never arrived because another rank failed; the hooks are off all the same.
        """
        if self._removed:
            return
        self._removed = lost = True
        try:
            self.flush()
            lost = False
        finally:
            self._arrivals.release()
            for handle in self._handles:
                handle.remove()
            try:
                for updates in list(self._updates):
                    updates.remove()
            finally:
                self._deferral.remove()
                self._slot.give_back(self, self._reducer, failed=failed or lost)
                self._forget_processes()

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        synchronised = model.training and torch.is_grad_enabled() and self.model.require_backward_grad_sync
        if not self._sending.buckets.is_steady:
            self.flush()
            self._sending.buckets.forget()  # the wrapper is about to build them anew
        if synchronised:
            self._deferral.split.forget()
        even = not self._joins(self.model)  # a rank that has joined early follows the wrapper's own order
        if synchronised and even:
            self._choose_k()
        if torch.is_grad_enabled():  # else an earlier forward pass may wait for its backward pass
            self._passes.splits = synchronised and even and self.k_choice.order_stays_because is None

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not self._expects_loss:
            self.watch(output)
        self.flush()  # gradients of parameters that nobody read lie in buckets that the backward pass overwrites
        if model.training and torch.is_grad_enabled():
            self._kept.warn()

    def _choose_k(self) -> None:
        sending = self._sending
        if not sending.buckets.is_steady:
            sending.plan, self._deferral.k = None, 0
            return
        is_first = sending.plan is None
        if self._chosen_at == self._report.steps and not is_first:
            return
        self._chosen_at = self._report.steps
        k = self.k_choice.next_step(is_first=is_first, steps=self._report.steps)
        if k is not None and (k != self._deferral.k or is_first):
            self._deferral.k = k
            sending.plan = BucketPlan(sending.buckets, self._deferral.blocks[:k])

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Report a full bucket as done, and start its all-reduce unless it leaves in our own order."""
        buffer = bucket.buffer()
        if self._joins(self.model):
            scale(buffer, self._slot.ranks, divide=self._divide)
            return self._slot.sum(bucket)
        self._sending.start_full(bucket, defers=self._passes.splits)
        if bucket.is_last():
            at_end_of_backward(self._on_backward_done)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _on_block(self, block: Block | None) -> None:
        if self._passes.splits:
            self._sending.start_behind(block)

    def _on_backward_done(self) -> None:
        """All buckets are full; the weight gradients that waited may still be on the way through their last lines."""
        if self._deferral.is_finishing:
            return
        if self._passes.splits and self._sending.first_bucket is not None:
            self._deferral.finish()  # none of the chosen layers could be cut out, so nothing waited
        else:
            self._arrange_waits()

    def _arrange_waits(self) -> None:
        self._report.steps += 1
        self._kept.note()
        self._arrivals.expect(self._sending.reductions.take())
