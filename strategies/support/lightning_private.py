"""Every private name of Lightning and torchmetrics that retime uses: one accessor each, and no other file may use one.

All of them are known in lightning 2.6 and torchmetrics 1.9. A name that is gone raises
:class:`~retime.foundations.torch_private.PrivateNameError` with the feature that needs it, at import or at
first use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_prefixed_message
from torchmetrics import Metric

from retime.foundations.patching import replaced_attributes
from retime.foundations.torch_private import needed_by, read_private, write_private

with needed_by("the reports of strategies that start processes of their own (..._spawn, ..._fork)"):
    from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as ProcessLauncher

    DDPStrategy._configure_launcher  # noqa: B018
"""The launcher that starts processes and brings their results home."""

with needed_by("the order of training batches in a pipeline"):
    from lightning.pytorch.utilities.data import _is_dataloader_shuffled as _shuffles
with needed_by("ooo_ddp and fused_optimizer_ddp, whose reductions are DDP's communication hook,"):
    DDPStrategy._register_ddp_hooks  # noqa: B018


class DDPMoments(DDPStrategy):
    """``ddp`` with names for two moments at which Lightning calls private methods."""

    def register_hooks(self) -> None:
        """The model is wrapped, and DDP takes a communication hook now; Lightning gives it the user's."""
        super()._register_ddp_hooks()

    def choose_launcher(self, launcher: Launcher | None) -> Launcher | None:
        """Launcher of the fit, given what Lightning would take."""
        return launcher

    def _register_ddp_hooks(self) -> None:
        self.register_hooks()

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = self.choose_launcher(read_private(self, "_launcher", "reports of spawned processes"))


def start_method_of(strategy: DDPStrategy) -> Any:
    """Method by which ``ddp_spawn`` and ``ddp_fork`` start processes; for the reports that come home from them."""
    return read_private(strategy, "_start_method", "the reports of strategies that start processes of their own")


def user_comm_hook(strategy: DDPStrategy) -> tuple[Any, Any]:
    """The communication hook that a ``ddp`` strategy was given, in its wrapper, and its state; for backward fusion."""
    feature = "backward fusion beside a communication hook of the user's"
    hook, state, wrapper = (
        read_private(strategy, name, feature) for name in ("_ddp_comm_hook", "_ddp_comm_state", "_ddp_comm_wrapper")
    )
    return (wrapper(hook) if hook is not None and wrapper is not None else hook), state


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """The keyword arguments for ``DistributedDataParallel``, the dictionary itself; for ooo_ddp's bucket size."""
    options: dict[str, Any] = read_private(strategy, "_ddp_kwargs", "ooo_ddp, which chooses the size of DDP's buckets,")
    return options


def timeout_of(strategy: DDPStrategy) -> timedelta | None:
    """Return the timeout of collectives, for the process groups of ooo_ddp's and memory_budget_ddp's own."""
    timeout: timedelta | None = read_private(
        strategy, "_timeout", "ooo_ddp and memory_budget_ddp, whose own process groups have the strategy's timeout,"
    )
    return timeout


def given_device(strategy: SingleDeviceStrategy) -> torch.device:
    """The device that a single-device strategy was made for; for the strategies that take the Trainer's choice."""
    device: torch.device = read_private(strategy, "_root_device", "the strategies for one device")
    return device


def skips_backward(trainer: Trainer) -> bool:
    """Return whether a callback takes the backward pass away (SWA's BatchNorm epoch); for memory budgets."""
    feature = "memory budgets in StochasticWeightAveraging's BatchNorm epoch"
    skips = getattr(trainer.fit_loop, "_skip_backward", None)
    return bool(read_private(trainer.fit_loop, "_skip_backward", feature) if skips is None else skips)


def logged_step(trainer: Trainer) -> int:
    """The loggers' x axis, as Lightning's monitors use it; for StepTimeline, PeakMemory and MemoryTimeline."""
    feature = "the place of StepTimeline's and PeakMemory's numbers on the loggers' x axis"
    return int(read_private(trainer.fit_loop.epoch_loop, "_batches_that_stepped", feature))


@contextmanager
def in_the_loaders_order(trainer: Trainer) -> Iterator[None]:
    """Inside, a training loader that does not shuffle is not shuffled by the sampler that Lightning gives it.

    Lightning gives loaders one that divides batches between ranks, which those of one pipeline must not do.
    """
    feature = "the order of training batches in a pipeline"
    connector = read_private(trainer, "_data_connector", feature)
    prepare = read_private(connector, "_prepare_dataloader", feature)

    def prepare_dataloader(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        return prepare(dataloader, shuffle=shuffle and _shuffles(dataloader), mode=mode)

    with replaced_attributes(connector, _prepare_dataloader=prepare_dataloader):
        yield


_TOGETHER_S = 2.0
"""Within which a scheduler signals all ranks of a machine; the error of a rank that is lost without waits as long."""


def end_behind_batch_on_sigterm(trainer: Trainer, tells_of_lost_rank: Callable[[BaseException], bool]) -> None:
    """Let SIGTERM end this rank's fit behind the batch, as on one device; a strategy's ``setup`` calls this.

    Lightning's handler waits in a broadcast of rank 0's, which does not come while that rank waits for this one. Where
    all ranks get SIGTERM, one ends a moment before the others, to which it is lost: they end with SIGTERMException too.

    Args:
        tells_of_lost_rank: whether an error says that another rank is gone.
    """
    feature = "the end of a rank that gets SIGTERM"
    connector = read_private(trainer, "_signal_connector", feature)
    read_private(connector, "received_sigterm", feature)
    write_private(connector, "_sigterm_notifier_fn", partial(_note_sigterm, connector), feature)
    write_private(trainer, "_run_stage", partial(_run_stage, trainer, connector, tells_of_lost_rank), feature)


def _run_stage(trainer: Any, connector: Any, tells_of_lost_rank: Callable[[BaseException], bool]) -> Any:
    del trainer._run_stage  # the class's, for the next run
    try:
        return trainer._run_stage()
    except Exception as error:
        if tells_of_lost_rank(error):
            until = time.monotonic() + _TOGETHER_S
            while not connector.received_sigterm and time.monotonic() < until:
                time.sleep(0.02)
            if connector.received_sigterm:
                raise SIGTERMException from error
        raise


def _note_sigterm(connector: Any, number: int, frame: object) -> None:
    log = logging.getLogger(signal_connector.__name__)
    log.info(rank_prefixed_message(f"Received SIGTERM: {number}", connector.trainer.local_rank))
    launcher = connector.trainer.strategy.launcher
    if not connector.received_sigterm and launcher is not None:
        launcher.kill(number)  # the ranks that this one has started
    connector.received_sigterm = True


def has_batch_norm(callback: StochasticWeightAveraging) -> bool:
    """Return whether SWA runs an epoch for BatchNorm, and steps once more after it; for backward fusion."""
    return bool(read_private(callback, "_model_contains_batch_norm", "fusion beside StochasticWeightAveraging"))


def averages_models(strategy: Strategy) -> bool:
    """Return whether ``ddp`` averages weights after the step (post-local SGD); for fusion."""
    if not isinstance(strategy, DDPStrategy):
        return False
    return read_private(strategy, "_model_averager", "fusion beside post-local SGD") is not None


@contextmanager
def logging_as(module: LightningModule, hook: str) -> Iterator[None]:
    """``module.log`` inside logs as it does in that hook; for memory budgets, which log after their sub-batches."""
    if not hasattr(module, "_current_fx_name"):
        read_private(module, "_current_fx_name", "the logged values of memory budgets")
    with replaced_attributes(module, _current_fx_name=hook):
        yield


def sync_on_forward(metric: Metric, sync: bool) -> None:
    """Let ``metric.compute()`` add up over ranks, or not; for metrics under memory budgets (torchmetrics)."""
    write_private(metric, "_to_sync", sync, "metrics over ranks under memory budgets")


def show_as_step_value(metric: Metric, value: Any) -> None:
    """Make ``value`` what Lightning logs as the metric's value of this step; for memory budgets (torchmetrics)."""
    write_private(metric, "_forward_cache", value, "the step's value of metrics under memory budgets")


_SENT = ("_update_count", "_computed", "_forward_cache")


def metric_state(metric: Metric) -> dict[str, Any]:
    """All that updates change in a metric; for pipelines, whose last stage alone sees outputs (torchmetrics)."""
    feature = "metrics in a pipeline"
    names = [*read_private(metric, "_defaults", feature), *_SENT]
    return {name: read_private(metric, name, feature) for name in names}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Give a metric what :func:`metric_state` gave of another; for pipelines (torchmetrics)."""
    for name, value in state.items():
        write_private(metric, name, move_data_to_device(value, metric.device), "metrics in a pipeline")
