"""Out-of-order data parallel: communication hides behind weight gradients and behind the next forward pass.

Oh et al. 2022, section 5.1. DistributedDataParallel and its buckets stay the engine. Its communication hook starts each
bucket's all-reduce and reports it as done; who really needs a gradient waits for it (``reductions``). The weight
gradients of the first k blocks run last, in forward order, and each block's gradients leave as soon as they are there:
the next forward pass needs them first.
"""

import time
import warnings
import zlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.mechanisms.arguments import AtLeast, checked
from retime.mechanisms.byte_sizes import parse_bytes
from retime.mechanisms.ddp import (
    BucketMap,
    Reduction,
    Reductions,
    Region,
    at_end_of_backward,
    comm_hook_of,
    release,
    scale,
    settle_gradients,
    sparse_layer,
)
from retime.mechanisms.ddp.reducers import DeviceReducer
from retime.mechanisms.no_effect import NoEffectWarning
from retime.mechanisms.out_of_order.k_tuner import KTuner
from retime.mechanisms.out_of_order.kept_k import KeptK
from retime.mechanisms.out_of_order.memory import extra_bytes, largest_affordable_k, peak_bytes_so_far
from retime.mechanisms.out_of_order.report import OutOfOrderReport
from retime.mechanisms.out_of_order.updates import CrossIterationUpdates
from retime.mechanisms.torch_private import has_rebuilt_buckets, joins_uneven_inputs
from retime.mechanisms.weight_gradients import Block, WeightGradientDeferral

SUPPORTED_BACKENDS = ("gloo", "nccl")
SMALLEST_MESSAGE_BYTES = 1024 * 1024
"""Gradients of neighbouring blocks are sent together until they are this large."""
UNUSED = "find_unused_parameters=True lets ranks differ in what they compute; use static_graph=True, or leave it out"
RANKS_DIFFER = "the ranks ran the layers of their first step in different orders"
K = Annotated[int, AtLeast(0)] | Literal["auto"]
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

    :param model: built with ``gradient_as_bucket_view=True`` and without a communication hook.
    :param optimizers: those that step its parameters; more can be given to :meth:`attach`.
    :param k: how many blocks, in forward order, have their weight gradients computed last; ``"auto"`` measures during
        the first steps (section 5.1) and keeps the fastest. Values above the number of blocks raise once it is known.
    :param max_memory: bytes, or ``"8GiB"``; bounds k (algorithm 2, lines 1 and 2). None: no bound.
    :param cross_iteration: let ``optimizer.step()`` return while all-reduces are on their way.
    :param blocks: names of the modules that k counts; None: repeated blocks, else single layers.
    :param divide: whether gradients are divided by the number of ranks, as the plain wrapper does with bucket views;
        False: multiplied by the rounded reciprocal, as it does without.
    :param timeout: of the two process groups made here; None: torch's default.
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
        timeout: Any = None,
    ) -> None:
        _check_model(model)
        self.model = model
        self.cross_iteration = cross_iteration
        self.max_memory = None if max_memory is None else parse_bytes("max_memory", max_memory)
        self._wanted: K = k
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
        self._map = BucketMap()
        self._divide = divide
        self._carrying: dict[Tensor, Reduction] = {}
        self._updates: list[CrossIterationUpdates] = []
        self._tuner: KTuner | None = None
        self._plan: _Plan | None = None
        self._handles: list[Any] = []
        self._removed = self._read_early = self._compared = self._changed = False
        self._search_steps = 0
        self.expects_loss = False
        """Set by an owner that calls :meth:`watch` with the loss, which shows more than the model's output does."""
        self._no_order: str | None = None
        self.known_k: tuple[int, int] | None = None
        """What an earlier search found, and for how many blocks: then ``"auto"`` does not search."""
        if dist.get_world_size(model.process_group) < 2:
            warnings.warn(f"out-of-order data parallel has no effect: {ALONE}", NoEffectWarning, stacklevel=3)
            self._removed = True
            self._deferral.remove()
            return
        self._slot = comm_hook_of(model)
        self._slot.take(self, "out-of-order data parallel", "remove yours, or use plain DistributedDataParallel")
        self._reductions = Reductions(model.process_group, divide=divide, timeout=timeout)
        self._never_rebuilds = model.find_unused_parameters and not model.static_graph
        if self._never_rebuilds:
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
        self._no_order = reason
        if isinstance(self._wanted, int) and self._wanted > 0:
            warnings.warn(f"k={self._wanted} has no effect: {reason}", NoEffectWarning, stacklevel=3)

    @property
    def is_searching(self) -> bool:
        """Whether ``k="auto"`` is still measuring."""
        return self._wanted == "auto"

    @checked
    def set_k(self, k: K) -> None:
        """Use this k from the next step on; ``"auto"`` searches again. All ranks must be given the same."""
        if isinstance(k, int):
            self._check_range(k)
        self._wanted, self._tuner, self.known_k, self._changed = k, None, None, True

    def attach(self, optimizer: Optimizer) -> CrossIterationUpdates:
        """Let this optimizer's updates wait for their own gradients only; returns the fusion that does it."""
        updates = CrossIterationUpdates(optimizer, self.model.module, self._carrying.get)
        self._updates.append(updates)
        return updates

    def watch(self, loss: Any) -> None:
        """Look at the graph under the loss before its first backward pass; otherwise the model's output is taken."""
        if self._deferral.is_watching and self._defers:
            self._deferral.watch(loss)
            if isinstance(self._wanted, int):
                self._check_range(self._wanted)

    def flush(self) -> None:
        """Wait for every all-reduce and run every update that is still pending."""
        settle_gradients(list(self._carrying))
        for updates in self._updates:
            updates.flush()
        self._carrying.clear()

    def report(self) -> OutOfOrderReport:
        """What was done so far."""
        report = self._report
        report.blocks, report.k = len(self._deferral.blocks), self.k
        report.bucket_bytes = int(self.model.bucket_bytes_cap)
        report.deferred_gradients = self._deferral.deferred_gradients
        report.held_gradients = self._deferral.held_gradients
        report.kept = self._deferral.kept
        report.held = self._deferral.held
        fused = [updates.report() for updates in self._updates]
        report.fused_updates = sum(part.fused_updates for part in fused)
        report.late_updates = sum(part.late_updates for part in fused)
        report.plain_steps = {reason: count for part in fused for reason, count in part.plain_steps.items()}
        report.in_order = {self._no_order: report.steps} if self._no_order else {}
        report.extra_bytes = extra_bytes(self._deferral, self.k)
        if self._tuner is not None:
            report.searched = dict(self._tuner.measured)
            report.search_steps = self._search_steps
        return report

    def remove(self) -> None:
        """Bring all parameters up to date and take the hooks off; gradients are then reduced by the wrapper again.

        Raises:
            RuntimeError: a gradient never arrived because another rank failed; the hooks are off all the same.
        """
        if self._removed:
            return
        self._removed = True
        try:
            self.flush()
        finally:
            release(self._carrying)
            self._carrying.clear()
            for updates in self._updates:
                updates.remove()
            for handle in self._handles:
                handle.remove()
            self._deferral.remove()
            self._reductions.close()
            self._slot.give_back(self)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        deferral = self._deferral
        synchronised = model.training and torch.is_grad_enabled() and self.model.require_backward_grad_sync
        if not self._map.is_steady:
            self.flush()
            self._map.forget()  # the wrapper is about to build its buckets anew
        if synchronised:
            deferral.forget()
            self._choose_k()
        even = not joins_uneven_inputs(self.model)  # a rank that has joined early follows the wrapper's own order
        self._defers = synchronised and even and self._no_order is None

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not self.expects_loss:
            self.watch(output)
        self.flush()  # gradients of parameters that nobody read lie in buckets that the backward pass overwrites

    def _choose_k(self) -> None:
        deferral = self._deferral
        if not self._map.is_steady:
            self._plan, deferral.k = None, 0
            return
        if not self._compared:
            self._compare_ranks()
        if not deferral.blocks or self._no_order is not None:
            return
        if self._wanted != "auto":
            if self._plan is None or self._changed:
                self._use(self._bounded(self._wanted))
                self._changed = False
            return
        if self._tuner is None and self.known_k is not None and self.known_k[1] == len(deferral.blocks):
            self._wanted = self.known_k[0]
            self._use(self._bounded(self._wanted))
            return
        if self._tuner is None:
            self._tuner = KTuner(len(deferral.blocks), self._affordable(), self._largest)
            self._use(self._tuner.k)
        elif self._tuner.tick(time.perf_counter()):
            self._use(self._tuner.k)
        self._search_steps = self._report.steps
        if self._tuner.is_done:
            self._wanted = self._tuner.k

    def _compare_ranks(self) -> None:
        """Leave the order alone unless all ranks found the same blocks: they have to send the same things in turn."""
        self._compared = True
        found = repr([(block.name, [layer.name for layer in block.layers]) for block in self._deferral.blocks])
        mark = float(zlib.crc32(found.encode()))
        if (self._largest(mark), -self._largest(-mark)) != (mark, mark):
            self.keep_order(RANKS_DIFFER)

    def _check_range(self, k: int) -> None:
        blocks = len(self._deferral.blocks)
        if k > blocks > 0:
            raise ValueError(
                f"k={k}, but the model has {blocks} blocks: {', '.join(self.blocks)}; choose 0 to {blocks}"
            )

    def _bounded(self, k: int) -> int:
        self._check_range(k)
        return min(k, self._affordable())

    def _affordable(self) -> int:
        if self.max_memory is None:
            return len(self._deferral.blocks)
        peak = peak_bytes_so_far(next(self.model.module.parameters()).device)
        return largest_affordable_k(self._deferral, self.max_memory, int(self._largest(peak)))

    def _use(self, k: int) -> None:
        if k != self._deferral.k or self._plan is None:
            self._deferral.k = k
            self._plan = _Plan(self._map, self._deferral.blocks[:k])

    def _largest(self, value_here: float) -> float:
        """The largest of all ranks' values, of which all get the same number."""
        device = "cpu" if dist.get_backend(self.model.process_group) == "gloo" else torch.cuda.current_device()
        value = torch.tensor([value_here], dtype=torch.float64, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.model.process_group)
        return float(value)

    def kept_k(self) -> KeptK | None:
        """What a checkpoint should keep; None while k is searched for, or before there are blocks."""
        blocks = len(self._deferral.blocks)
        if self.is_searching or not blocks:
            return None
        world_size = dist.get_world_size(self.model.process_group)
        return KeptK(self.k, blocks, self.model.bucket_bytes_cap / 2**20, world_size)

    def use_kept_k(self, kept: KeptK) -> None:
        """Let ``"auto"`` take up the k of an earlier run, if that had as many ranks and blocks."""
        if kept.world_size == dist.get_world_size(self.model.process_group):
            self.known_k = (kept.k, kept.blocks)

    def discard_measurement(self) -> None:
        """Something other than training took time since the last step: do not count it when searching for k."""
        if self._tuner is not None:
            self._tuner.discard()

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Report a full bucket as done, and start its all-reduce unless it leaves in our own order."""
        buffer = bucket.buffer()
        if joins_uneven_inputs(self.model):
            scale(buffer, dist.get_world_size(self.model.process_group), divide=self._divide)
            return DeviceReducer(self.model.process_group).start(bucket.index(), buffer)
        ours = self._is_ours(bucket.index())
        final = has_rebuilt_buckets(self.model) or self._never_rebuilds
        if not self._map.learn(bucket, final=final) and ours:
            raise RuntimeError(
                "DistributedDataParallel built its buckets anew in the middle of training, and gradients were sent "
                "from the old ones: use k=0 for this model"
            )
        if not ours:
            self._reductions.start(bucket.parameters(), buffer, urgent=False)
        if bucket.is_last():
            at_end_of_backward(self._on_backward_done)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _is_ours(self, bucket: int) -> bool:
        """Whether this bucket's gradients leave in our order, not when the wrapper finds the bucket full."""
        plan = self._plan
        return self._defers and plan is not None and plan.first_bucket is not None and bucket >= plan.first_bucket

    def _on_block(self, block: Block | None) -> None:
        plan = self._plan
        if plan is None or not self._defers:
            return
        if block is None:
            for region in plan.others:
                self._reductions.start(region.parameters, region.values, urgent=False)
            return
        for region in plan.behind.get(block.name, ()):
            self._reductions.start(region.parameters, region.values, urgent=True)

    def _on_backward_done(self) -> None:
        """All buckets are full; the weight gradients that waited may still be on the way through their last lines."""
        if self._deferral.is_finishing:
            return
        if self._is_ours(2**31):
            self._deferral.finish()  # none of the chosen layers could be cut out, so nothing waited
        else:
            self._arrange_waits()

    def _arrange_waits(self) -> None:
        self._report.steps += 1
        self._read_early = False
        self._carrying.clear()
        for reduction in self._reductions.take():
            if self.cross_iteration:
                reduction.watch(self._on_early_read)
            else:
                reduction.wait()
            self._carrying.update(dict.fromkeys(reduction.parameters, reduction))

    def _on_early_read(self) -> None:
        if not self._read_early:
            self._read_early = True
            self._report.early_waits += 1


class _Plan:
    """Which gradients leave when, for one k: a cut through the wrapper's buckets."""

    def __init__(self, buckets: BucketMap, blocks: list[Block]) -> None:
        mine = [[p for layer in block.layers for p in layer.parameters] for block in blocks]
        chosen = {p for parameters in mine for p in parameters}
        self.first_bucket = buckets.first_bucket_of(chosen)
        self.others: list[Region] = []
        """Sent before the first weight gradient that waited: they share buckets with those that wait."""
        self.behind: dict[str, list[Region]] = {}
        """Sent behind each block's weight gradients."""
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


def _check_model(model: DistributedDataParallel) -> None:
    backend = dist.get_backend(model.process_group)
    if backend not in SUPPORTED_BACKENDS:
        raise ValueError(f"backend {backend!r} is not supported: use {' or '.join(SUPPORTED_BACKENDS)}")
    if dist.get_world_size(model.process_group) < 2:
        return  # it does nothing then
    if not model.gradient_as_bucket_view:
        raise ValueError("build the model with DistributedDataParallel(..., gradient_as_bucket_view=True)")
    if model.mixed_precision is not None:
        raise ValueError("DistributedDataParallel(mixed_precision=...) is not supported: use autocast instead")
    layer = sparse_layer(model.module)
    if layer is not None:
        raise ValueError(f"the sparse gradients of {layer!r} cannot go through a communication hook: use sparse=False")
