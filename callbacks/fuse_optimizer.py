"""Optimizer fusion as a callback, beside a single-device or DDP strategy."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism, refuse
from retime.foundations.ddp import sparse_layer
from retime.foundations.patching import layered_methods
from retime.mechanisms.fusion import FusionReport, reduction_of
from retime.strategies.support.base import refuse_other_trainer
from retime.strategies.support.fused_stepping import FusedStepping, mechanisms_of


class FuseOptimizer(Callback):
    """Fuse the optimizers' updates into the backward or the next forward pass (Jiang et al. 2021).

    Does what ``strategy="fused_optimizer"`` does, beside another single-device or DDP strategy. Under DDP in backward
    mode it takes the communication hook; to use your own hook too, use
    ``FusedOptimizerDDPStrategy(ddp_comm_hook=...)`` instead.

    Args:
        mode: ``"backward"`` or ``"forward"``.
        bucket_bytes: as for :class:`~retime.strategies.FusedOptimizerStrategy`.

    Raises:
        ValueError: an unknown mode; when the fit begins, a strategy that shards or owns the optimizer.
    """

    @checked
    def __init__(self, mode: str = "backward", bucket_bytes: int | str | None = None) -> None:
        self._stepping = FusedStepping(mode, bucket_bytes)
        self._layer = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_other_trainer(trainer)
        strategy = trainer.strategy
        owned = isinstance(strategy, DeepSpeedStrategy | SingleDeviceXLAStrategy)  # subclasses of the two below
        if owned or not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise ValueError(
                f"FuseOptimizer cannot be used with {type(strategy).__name__}, which shards or owns the optimizer: "
                "use a single-device or DDP strategy"
            )
        refuse(Mechanism.fusion(self._stepping.mode), mechanisms_of(strategy))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy, stepping = trainer.strategy, self._stepping
        if isinstance(strategy.model, DistributedDataParallel) and stepping.mode == "backward":
            layer = sparse_layer(pl_module)
            if layer is not None:
                stepping.leave_plain(f"DDP cannot reduce the sparse gradients of {layer!r} through a hook")
            else:
                stepping.reduce_through(reduction_of(strategy.model))
        rank_zero_info(f"retime: {stepping.start(trainer)}")
        self._layer.close()  # a copy of a Trainer that was made during its fit has the original's
        fused = _FusedStep(stepping, trainer, strategy.optimizer_step)
        self._layer.enter_context(layered_methods(strategy, optimizer_step=fused))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._stepping.before_training_step(pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._stepping.before_backward(loss)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning does not call teardown after an exception
        self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if self._stepping.stop():
            rank_zero_info(f"retime: {self.report().headline}")
        self._layer.close()

    def flush(self) -> None:
        """Forward mode: run all pending updates now, before reads that bypass torch functions."""
        self._stepping.flush()

    def report(self) -> FusionReport:
        """Report on what was fused so far, and on which steps ran the plain way, why."""
        return self._stepping.report()


class _FusedStep:
    """Stands before a strategy's ``optimizer_step``; copied and pickled with the strategy."""

    def __init__(self, stepping: FusedStepping, trainer: Trainer, plain: Callable[..., Any]) -> None:
        self.stepping, self.trainer, self.plain = stepping, trainer, plain

    def __call__(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        further = {name: value for name, value in kwargs.items() if name != "model"}
        return self.stepping.step(
            self.trainer, optimizer, closure, lambda chosen: self.plain(optimizer, chosen, *args, **kwargs), further
        )
