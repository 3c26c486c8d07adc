"""Optimizer fusion as Lightning strategies (Jiang et al. 2021)."""

from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.ddp import sparse_layer
from retime.mechanisms.cpu_accumulation import BucketReduction
from retime.mechanisms.fusion import FusionReport, ReductionHook
from retime.strategies.support.base import (
    DDPArguments,
    HostReductionMixin,
    LightningOnly,
    ReduceOn,
    SingleDevice,
    refuse_users_hook,
)
from retime.strategies.support.fused_stepping import FusedStepping, StepsFused
from retime.strategies.support.lightning_private import user_comm_hook


class _Fused(LightningOnly, StepsFused):
    """Base of both strategies: hands every step to the stepping, and takes everything off at the end."""

    _stepping: FusedStepping

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Mechanisms that this strategy brings along."""
        return (Mechanism.fusion(self._stepping.mode),)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(f"retime: {self._stepping.start(trainer)}")

    def teardown(self) -> None:
        if self._stepping.stop():
            rank_zero_info(f"retime: {self.report().headline}")
        super().teardown()

    def report(self) -> FusionReport:
        """Report of what was fused so far, and which steps ran the plain way, why."""
        return self._stepping.report()

    def flush(self) -> None:
        """Forward mode: run all pending updates now, before reads that bypass torch functions."""
        self._stepping.flush()


class FusedOptimizerStrategy(_Fused, SingleDevice):
    """One device, with the optimizer fused into the backward or the next forward pass.

    Weights, optimizer state, logged values and ``global_step`` are bit-identical to the plain strategy's. Steps that
    cannot be fused exactly run the plain way, with one ``NoEffectWarning`` a reason before the first of them.

    Args:
        mode: ``"backward"`` (updates inside the backward pass, gradients freed at once) or ``"forward"`` (updates
            just before the next read; exact with norm clipping, GradScaler, gradient hooks and manual optimization).
        device: the one device; None: the one the Trainer chose.
        bucket_bytes: bytes gathered before one multi-tensor update, a number or ``"4MiB"``; None: 1 MiB on a CPU,
            8 MiB on CUDA, less for small models.
        side_stream: backward mode on CUDA: updates on a stream of their own, beside the backward pass.

    All other arguments are :class:`lightning.pytorch.strategies.SingleDeviceStrategy`'s.
    """

    strategy_name = "fused_optimizer"
    instead = "fused_optimizer_ddp"

    @checked
    def __init__(
        self,
        mode: str = "backward",
        device: str | int | torch.device | None = None,
        bucket_bytes: int | str | None = None,
        side_stream: bool = False,
        accelerator: Accelerator | str | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        self._stepping = FusedStepping(mode, bucket_bytes, side_stream)


class FusedOptimizerDDPStrategy(HostReductionMixin, _Fused, DDPArguments):
    """DistributedDataParallel, with each bucket's update right after its all-reduce (backward mode).

    Works with ``no_sync``, accumulation and a communication hook of the user's own. Bit-identical to ``ddp``.

    Args:
        mode: ``"backward"``, or ``"forward"``: updates just before the next forward pass reads the parameter.
        bucket_bytes: as for :class:`FusedOptimizerStrategy`.
        reduce_on: where gradients are summed: ``"device"``, or ``"host"``: by the processors, as under
            :class:`~retime.strategies.CPUAccumulateStrategy`.

    All other arguments are those of :class:`lightning.pytorch.strategies.DDPStrategy` and of the
    ``DistributedDataParallel`` that it makes, whose further ones are taken too.
    """

    strategy_name = "fused_optimizer_ddp"

    @checked
    def __init__(
        self, mode: str = "backward", bucket_bytes: int | str | None = None, reduce_on: ReduceOn = "device", **ddp: Any
    ) -> None:
        super().__init__(**ddp)
        if reduce_on == "host":
            refuse_users_hook(Mechanism.HOST_REDUCTION, ddp)
        self._stepping = FusedStepping(mode, bucket_bytes, distributed=True)
        self.reduce_on = reduce_on

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Mechanisms that this strategy brings along; in backward mode fusion owns the communication hook itself."""
        sums_beside_fusion = self.reduce_on == "host" and self._stepping.mode == "forward"
        return (*super().mechanisms, Mechanism.HOST_REDUCTION) if sums_beside_fusion else super().mechanisms

    def take_report(self, report: FusionReport) -> None:
        self._stepping.take_report(report)

    def register_hooks(self) -> None:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        self.end_reduction()
        reducer = self.make_reducer(model)
        if self._stepping.mode == "forward":
            if reducer is None:
                super().register_hooks()
            else:
                self._reduction = BucketReduction(model, reducer)
            return
        layer = sparse_layer(model.module)
        if layer is not None:
            self._stepping.leave_plain(f"DDP cannot reduce the sparse gradients of {layer!r} through a hook")
            super().register_hooks()
            return
        hook, state = None, None
        if self.root_device.type == "cuda":  # on other devices Lightning's DDPStrategy ignores the user's hook too
            hook, state = user_comm_hook(self)
        self._stepping.reduce_through(ReductionHook(model, hook, state, reducer=reducer))
