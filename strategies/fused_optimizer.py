"""Optimizer fusion as Lightning strategies (Jiang et al. 2021)."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.mechanisms.arguments import checked
from retime.mechanisms.fusion.data_parallel import ReductionHook, sparse_layer
from retime.mechanisms.fusion.report import FusionReport
from retime.strategies.flavour import LightningOnly
from retime.strategies.one_device import OneDevice
from retime.strategies.reports_home import ReportsHome
from retime.strategies.stepping import FusedStepping


class _Fused(LightningOnly, Strategy):
    """What both strategies do: hand every step to the stepping, and take everything off at the end."""

    _stepping: FusedStepping

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._stepping.start(trainer)

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._stepping.before_backward(closure_loss)
        super().pre_backward(closure_loss)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        plain = super().optimizer_step
        module = self.lightning_module
        assert module is not None
        return self._stepping.step(
            module.trainer, optimizer, closure, lambda chosen: plain(optimizer, chosen, model, **kwargs), kwargs
        )

    def teardown(self) -> None:
        self._stepping.stop()
        super().teardown()

    def report(self) -> FusionReport:
        """What was fused so far, and which steps ran the plain way, why."""
        return self._stepping.report()

    def flush(self) -> None:
        """Forward mode: run all pending updates now, for readers that bypass Python."""
        self._stepping.flush()


class FusedOptimizerStrategy(_Fused, OneDevice):
    """One device, with the optimizer fused into the backward or the next forward pass.

    Weights, optimizer state, logged values and ``global_step`` are bit-identical to the plain strategy's. Steps that
    cannot be fused exactly run the plain way, with one ``NoEffectWarning`` a reason before the first of them.

    :param mode: ``"backward"`` (updates inside the backward pass, gradients freed at once) or ``"forward"`` (updates
        just before the next read; exact with norm clipping, GradScaler, gradient hooks and manual optimization).
    :param device: the one device; None: the one the Trainer chose.
    :param bucket_bytes: bytes gathered before one multi-tensor update, a number or ``"4MiB"``; None: 1 MiB on a CPU,
        8 MiB on CUDA, less for small models.
    :param side_stream: backward mode on CUDA: updates on a stream of their own, beside the backward pass.
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
        **kwargs: Any,
    ) -> None:
        super().__init__(device=device, **kwargs)
        self._stepping = FusedStepping(mode, bucket_bytes, side_stream)


class FusedOptimizerDDPStrategy(_Fused, ReportsHome):
    """DistributedDataParallel, with each bucket's update right after its all-reduce (backward mode).

    Works with ``no_sync``, accumulation and a communication hook of the user's own. Bit-identical to ``ddp``. The
    further arguments are :class:`lightning.pytorch.strategies.DDPStrategy`'s.

    :param mode: ``"backward"``, or ``"forward"``: updates just before the next forward pass reads the parameter.
    """

    strategy_name = "fused_optimizer_ddp"

    @checked
    def __init__(self, mode: str = "backward", bucket_bytes: int | str | None = None, **ddp_kwargs: Any) -> None:
        super().__init__(**ddp_kwargs)
        self._stepping = FusedStepping(mode, bucket_bytes)
        self._stepping.distributed = True

    def take_report(self, report: FusionReport) -> None:
        self._stepping.take_report(report)

    def _register_ddp_hooks(self) -> None:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        if self._stepping.mode == "forward":
            super()._register_ddp_hooks()
            return
        layer, self._stepping.no_reduction = sparse_layer(model.module), None
        if layer is not None:
            self._stepping.no_reduction = f"DDP cannot reduce the sparse gradients of {layer!r} through a hook"
            super()._register_ddp_hooks()
            return
        hook, state = None, None
        if self.root_device.type == "cuda":  # on other devices Lightning's DDPStrategy ignores the user's hook too
            hook, state = self._ddp_comm_hook, self._ddp_comm_state
            if hook is not None and self._ddp_comm_wrapper is not None:
                hook = self._ddp_comm_wrapper(hook)
        self._stepping.reduction = ReductionHook(model, hook, state)
