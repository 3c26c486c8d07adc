"""Out-of-order data parallel: communication hides behind weight gradients and behind the next forward pass.

Oh et al. 2022, section 5.1. DistributedDataParallel and its buckets stay the engine. Its communication hook starts each
bucket's all-reduce and reports it as done; who really needs a gradient waits for it (``reductions``). The weight
gradients of the first k blocks run last, in forward order, and each block's gradients leave as soon as they are there:
the next forward pass needs them first.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import Timeout, checked
from retime.foundations.byte_sizes import parse_bytes
from retime.foundations.ddp import OwnGroupsReducer, Reducer, at_end_of_backward, comm_hook_of, scale
from retime.foundations.no_effect import warn_no_effect
from retime.foundations.torch_private import GradBucket, joins_uneven_inputs
from retime.foundations.weight_gradients import Block, WeightGradientDeferral
from retime.mechanisms.out_of_order.arrivals import Arrivals
from retime.mechanisms.out_of_order.attached import AttachedUpdates
from retime.mechanisms.out_of_order.k_choice import K, KChoice
from retime.mechanisms.out_of_order.memory import extra_bytes
from retime.mechanisms.out_of_order.report import OutOfOrderReport
from retime.mechanisms.out_of_order.saved_k import SavedK
from retime.mechanisms.out_of_order.sending import Sending
from retime.mechanisms.out_of_order.supported import check_model
from retime.mechanisms.out_of_order.updates import CrossIterationUpdates

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
        reducer: sums gradients, and is closed with this; None: all-reduces on the device, in two process groups made
            here.
        timeout: of these groups; None: torch's default.
        expects_loss: whether the owner calls :meth:`watch` with every loss, which shows more than the model's output.
        known_k: what an earlier run found (:meth:`saved_k`): ``"auto"`` does not search then, if ranks and blocks are
            as many as they were.
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
        self.model = model
        self._expects_loss = expects_loss
        self._report = OutOfOrderReport()
        self._defers = False
        """Whether the forward pass under way, or the last one, defers: not without gradient synchronisation, say."""
        self._deferral = WeightGradientDeferral(
            model.module,
            blocks=blocks,
            defers=lambda: self._defers,
            on_block=self._on_block,
            on_finished=self._arrange_waits,
        )
        self._choice = KChoice(model, self._deferral, k, most, known_k)
        self._divide = divide
        self._arrivals = Arrivals(self._report, cross_iteration=cross_iteration)
        self._updates = AttachedUpdates(model.module, self._arrivals.reduction_of)
        self._handles: list[Any] = []
        self._removed = False
        if dist.get_world_size(model.process_group) < 2:
            warn_no_effect(f"out-of-order data parallel has no effect: {ALONE}")
            self._removed = True
            self._deferral.remove()
            return
        self._slot = comm_hook_of(model)
        self._slot.take(self, "out-of-order data parallel", "remove yours, or use plain DistributedDataParallel")
        self._reducer: Reducer = reducer or OwnGroupsReducer(model.process_group, timeout)
        self._sending = Sending(model, self._reducer, divide=divide)
        if self._sending.never_rebuilds:
            self.keep_order(UNUSED)
        self._handles += [
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

    def keep_order(self, reason: str) -> None:
        """Leave all weight gradients in the conventional order from now on; whoever asked for a k is warned."""
        self._choice.keep_order(reason)

    @property
    def is_searching(self) -> bool:
        """Whether ``k="auto"`` is still measuring."""
        return self._choice.is_searching

    @checked
    def set_k(self, k: K) -> None:
        """Use this k from the next step on; ``"auto"`` searches again. All ranks must be given the same."""
        self._choice.want(k)

    def saved_k(self) -> SavedK | None:
        """What a checkpoint should keep; None while k is searched for, or before there are blocks."""
        return self._choice.to_save()

    def use_saved_k(self, saved: SavedK) -> None:
        """Let ``"auto"`` take up the k of an earlier run, if that had as many ranks and blocks."""
        self._choice.use_known(saved)

    def discard_measurement(self) -> None:
        """Something other than training took time since the last step: do not count it when searching for k."""
        self._choice.discard_measurement()

    def attach(self, optimizer: Optimizer) -> CrossIterationUpdates:
        """Let this optimizer's updates wait for their own gradients only.

        Returns:
            The fusion that does it; when it is removed, nothing here refers to the optimizer any more.
        """
        return self._updates.attach(optimizer)

    def watch(self, loss: Any) -> None:
        """Look at the graph under the loss before its first backward pass; otherwise the model's output is taken."""
        if self._deferral.is_watching and self._defers:
            self._deferral.watch(loss)
            self._choice.check_range()

    def flush(self) -> None:
        """Wait for every all-reduce and run every update that is still pending."""
        self._arrivals.settle()
        self._updates.flush()
        self._arrivals.forget()

    def report(self) -> OutOfOrderReport:
        """What was done so far."""
        report = self._report
        report.blocks, report.k = len(self._deferral.blocks), self.k
        report.bucket_bytes = int(self.model.bucket_bytes_cap)
        report.deferred_gradients = self._deferral.deferred_gradients
        report.buffered_gradients = self._deferral.buffered_gradients
        report.layers_in_order = self._deferral.layers_in_order
        report.buffered_layers = self._deferral.buffered_layers
        fused = self._updates.report()
        report.fused_updates, report.late_updates = fused.fused_updates, fused.late_updates
        report.plain_steps = fused.plain_steps
        reason = self._choice.order_stays_because
        report.in_order = {reason: report.steps} if reason else {}
        report.extra_bytes = extra_bytes(self._deferral, self.k)
        if self._choice.measured is not None:
            report.searched = self._choice.measured
            report.search_steps = self._choice.search_steps
        return report

    def remove(self) -> None:
        """Bring all parameters up to date and take the hooks off; gradients are then reduced by the wrapper again.

        Raises:
            RuntimeError: a gradient never arrived because another rank failed; the hooks are off all the same.
        """
        if self._removed:
            return
        self._removed = True
        failed = True
        try:
            self.flush()
            failed = False
        finally:
            self._arrivals.release()
            self._updates.remove()
            for handle in self._handles:
                handle.remove()
            self._deferral.remove()
            if failed:
                self._reducer.abort()
            else:
                self._reducer.close()
            self._slot.give_back(self)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        synchronised = model.training and torch.is_grad_enabled() and self.model.require_backward_grad_sync
        if not self._sending.is_steady:
            self.flush()
            self._sending.forget_buckets()  # the wrapper is about to build its buckets anew
        if synchronised:
            self._deferral.forget()
            self._choose_k()
        even = not joins_uneven_inputs(self.model)  # a rank that has joined early follows the wrapper's own order
        self._defers = synchronised and even and self._choice.order_stays_because is None

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not self._expects_loss:
            self.watch(output)
        self.flush()  # gradients of parameters that nobody read lie in buckets that the backward pass overwrites

    def _choose_k(self) -> None:
        sending = self._sending
        if not sending.is_steady:
            sending.forget_plan()
            self._deferral.k = 0
            return
        k = self._choice.next_step(is_first=not sending.has_plan, steps=self._report.steps)
        if k is not None and (k != self._deferral.k or not sending.has_plan):
            self._deferral.k = k
            sending.plan(self._deferral.blocks[:k])

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Report a full bucket as done, and start its all-reduce unless it leaves in our own order."""
        buffer = bucket.buffer()
        if joins_uneven_inputs(self.model):
            scale(buffer, self._slot.ranks, divide=self._divide)
            return self._slot.sum(bucket)
        self._sending.start_full(bucket, defers=self._defers)
        if bucket.is_last():
            at_end_of_backward(self._on_backward_done)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _on_block(self, block: Block | None) -> None:
        if self._defers:
            self._sending.start_behind(block)

    def _on_backward_done(self) -> None:
        """All buckets are full; the weight gradients that waited may still be on the way through their last lines."""
        if self._deferral.is_finishing:
            return
        if self._defers and self._sending.waits_for_some:
            self._deferral.finish()  # none of the chosen layers could be cut out, so nothing waited
        else:
            self._arrange_waits()

    def _arrange_waits(self) -> None:
        self._report.steps += 1
        self._arrivals.expect(self._sending.take())
