"""Out-of-order data parallel as a Lightning strategy (Oh et al. 2022, section 5.1)."""

import sys
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.ddp import bucket_mb, measured_seconds_per_mb, sparse_layer
from retime.foundations.messages import parse_bytes, warn_no_effect
from retime.mechanisms.fusion import FusionReport
from retime.mechanisms.out_of_order import ALONE, K, OutOfOrderDataParallel, OutOfOrderReport, SavedK, read_saved_k
from retime.strategies.support.base import (
    DDPArguments,
    HostReductionMixin,
    LightningOnly,
    ReduceOn,
    hook_was_not_asked_for,
    refuse_users_hook,
)
from retime.strategies.support.fused_stepping import FusedStepping, StepsFused
from retime.strategies.support.lightning_private import ddp_options, timeout_of

CHECKPOINT_KEY = "retime_ooo_ddp"
FIXED_BUCKET_MB = 4
"""With deterministic algorithms, where nothing that changes sums may depend on a measurement."""
MANUAL = "manual optimization decides by itself which gradients it wants, so the order of backward passes stays"


class OOODataParallelStrategy(HostReductionMixin, LightningOnly, StepsFused, DDPArguments):
    """``ddp`` that hides gradient communication behind weight gradients and behind the next forward pass.

    The weight gradients of the first k blocks run last, in forward order, each block's gradients leave at once, and
    ``optimizer.step()`` does not wait for them: each parameter is updated when the next forward pass reads it and its
    gradient has arrived. Whatever reads a gradient or a weight earlier waits for it, so clipping, scalers, callbacks
    and checkpoints see what they would see under ``ddp``.

    On two ranks everything is bit-identical to ``ddp``; on more, gradients are summed in other pieces than its buckets
    and may round differently in the last bit, as they do when ``bucket_cap_mb`` changes.

    Args:
        k: how many blocks are re-ordered; ``"auto"`` measures in the first steps (at most 60), keeps the fastest and
            stores it in the checkpoint.
        max_memory: bytes (or ``"8GiB"``) a rank may use at its peak (CUDA: allocated; CPU: resident); bounds k.
        cross_iteration: False: ``optimizer.step()`` waits for all gradients, as under ``ddp``.
        blocks: names of the modules that k counts; None: the model's repeated blocks, else its layers.
        reduce_on: where gradients are summed: ``"device"``, or ``"host"``: by the processors, as under
            :class:`~retime.strategies.CPUAccumulateStrategy`.
        bucket_cap_mb: MiB of a gradient bucket; None: of 1 to 25 MiB, chosen by measurement to take about 20 ms.

    All other arguments are those of :class:`lightning.pytorch.strategies.DDPStrategy` and of the
    ``DistributedDataParallel`` that it makes, whose further ones are taken too. A communication hook is refused. With
    one process there is no communication to hide: it trains as ``ddp`` does, with one ``NoEffectWarning``.
    """

    strategy_name = "ooo_ddp"
    mechanisms = (Mechanism.OUT_OF_ORDER,)
    urgent_sums = True
    _stepping: FusedStepping

    @checked
    def __init__(
        self,
        k: K = "auto",
        max_memory: int | str | None = None,
        cross_iteration: bool = True,
        blocks: Iterable[str] | None = None,
        reduce_on: ReduceOn = "device",
        gradient_as_bucket_view: bool = False,
        **ddp: Any,
    ) -> None:
        if max_memory is not None:
            max_memory = parse_bytes("max_memory", max_memory)
        self._divide = gradient_as_bucket_view
        super().__init__(**ddp, gradient_as_bucket_view=True)
        refuse_users_hook(Mechanism.OUT_OF_ORDER, ddp)
        self.reduce_on = reduce_on
        self._wanted, self._max_memory, self._cross_iteration = k, max_memory, cross_iteration
        self._block_names = list(blocks) if blocks is not None else None
        self._ooo: OutOfOrderDataParallel | None = None
        self._last_report: OutOfOrderReport = OutOfOrderReport()
        self._known_k: SavedK | None = None
        self._was_searching = False
        self._stepping = FusedStepping(
            "forward", distributed=True, make_fusion=self._make_updates, mechanism="the cross-iteration wait"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, has the counts; it re-orders in a fit of its own."""
        return super().__getstate__() | {"_ooo": None, "_last_report": self.report()}

    @property
    def k(self) -> K:
        """The number of blocks whose weight gradients run last at the moment."""
        if self._ooo is not None:
            return self._ooo.k
        return 0 if self.model is not None and self._is_alone else self._wanted

    @checked
    def set_k(self, k: K) -> None:
        """Use this k from the next step on; ``"auto"`` searches (again). All ranks must be given the same."""
        self._wanted = k
        if self._ooo is not None:
            self._ooo.set_k(k)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING or self._is_alone:
            return
        if self._ooo is None or self._ooo.model is not self.model:
            raise RuntimeError(
                hook_was_not_asked_for("training would be that of plain ddp", "use strategy='ddp' meanwhile")
            )
        waits = f"; {self._stepping.start(trainer)}" if self._cross_iteration else ""
        rank_zero_info(f"retime: out-of-order backprop on {self.world_size} ranks with k={self._wanted!r}{waits}")

    def configure_ddp(self) -> None:
        if "bucket_cap_mb" not in ddp_options(self) and not self._is_alone:
            ddp_options(self)["bucket_cap_mb"] = self._choose_bucket_size()
        super().configure_ddp()

    def _choose_bucket_size(self) -> int:
        if not torch.are_deterministic_algorithms_enabled():
            return bucket_mb(measured_seconds_per_mb())
        if self._wanted == "auto" and self.world_size > 2:
            rank_zero_warn(
                "k='auto' measures, so on more than two ranks a second run may round sums differently even with "
                "deterministic algorithms: give k a number"
            )
        return FIXED_BUCKET_MB

    @property
    def _is_alone(self) -> bool:
        return self.world_size < 2

    def register_hooks(self) -> None:
        if self._is_alone:
            warn_no_effect(f"strategy={self.strategy_name!r} has no effect: {ALONE}")
            super().register_hooks()
            return
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        layer = sparse_layer(model.module)
        if layer is not None:
            raise ValueError(
                f"ooo_ddp cannot send the sparse gradients of {layer!r} through DDP's communication hook: use "
                "sparse=False, or strategy='ddp'"
            )
        reducer = self.make_reducer(model)
        with ExitStack() as if_refused:
            if reducer is not None:
                if_refused.callback(reducer.close)
            self._ooo = OutOfOrderDataParallel(
                model,
                k=self._wanted,
                max_memory=self._max_memory,
                cross_iteration=self._cross_iteration,
                blocks=self._block_names,
                divide=self._divide,
                reducer=reducer,
                timeout=timeout_of(self),
                expects_loss=True,
                known_k=self._known_k,
            )
            if_refused.pop_all()
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._ooo.k_choice.keep_order(MANUAL)

    def _make_updates(self, optimizer: Optimizer, module: LightningModule) -> Any:
        assert self._ooo is not None
        return self._ooo.attach(optimizer)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._ooo is not None:
            self._tell_search()
            self._ooo.flush()  # of a backward pass before, which may have no forward pass behind it
        super().pre_backward(closure_loss)
        if self._ooo is not None:
            self._ooo.watch(closure_loss)

    @property
    def fuses_steps(self) -> bool:
        return self._ooo is not None and self._cross_iteration

    def _tell_search(self) -> None:
        """Say once that a search has begun, and once what it found."""
        assert self._ooo is not None
        searching = self._ooo.k_choice.is_searching
        if searching and not self._was_searching:
            rank_zero_info("retime: searching for k during the first steps; all of them count for training")
        elif self._was_searching and not searching and self._ooo.k_choice.order_stays_because is None:
            report = self._ooo.report()
            times = ", ".join(f"k={k}: {seconds * 1e3:.0f} ms" for k, seconds in sorted(report.searched.items()))
            rank_zero_info(f"retime: k={report.k} is the fastest after {report.search_steps} steps ({times})")
        self._was_searching = searching

    def on_validation_start(self) -> None:
        self._pause()
        super().on_validation_start()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._pause()
        saved = None if self._ooo is None else self._ooo.k_choice.to_save()
        if saved is not None:
            checkpoint[CHECKPOINT_KEY] = saved.state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        saved = read_saved_k(checkpoint[CHECKPOINT_KEY]) if CHECKPOINT_KEY in checkpoint else None
        if saved is not None and saved.world_size == self.world_size:
            self._known_k = saved
            ddp_options(self).setdefault("bucket_cap_mb", saved.bucket_cap_mb)
            if self._ooo is not None:
                self._ooo.k_choice.use_known(saved)
        return checkpoint

    def _pause(self) -> None:
        if self._ooo is not None:
            self._ooo.k_choice.discard_measurement()

    def teardown(self) -> None:
        ooo, self._ooo = self._ooo, None
        failing = sys.exc_info()[0] is not None
        try:
            if ooo is not None:
                ooo.remove(failed=failing)
        except RuntimeError as error:
            if not failing:
                raise
            warnings.warn(f"the last step's updates are lost, another rank has failed: {error}", stacklevel=2)
        finally:
            if ooo is not None:
                self._last_report = ooo.report()
                rank_zero_info(f"retime: {self._last_report.headline}")
            self._stepping.stop()
            super().teardown()

    def report(self) -> OutOfOrderReport:
        """Report of what was re-ordered so far, and what could not be, why."""
        report = self._last_report if self._ooo is None else self._ooo.report()
        steps: FusionReport = self._stepping.report()
        report.plain_steps = steps.plain_steps
        report.late_updates = steps.late_updates
        return report

    def take_report(self, report: OutOfOrderReport) -> None:
        super().take_report(report)
        steps = FusionReport(mode="forward", plain_steps=report.plain_steps, late_updates=report.late_updates)
        self._stepping.take_report(steps)

    def flush(self) -> None:
        """Wait for all gradients and run all pending updates now, before reads that bypass torch functions."""
        if self._ooo is not None:
            self._ooo.flush()
