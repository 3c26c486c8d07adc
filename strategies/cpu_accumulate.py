"""Gradient accumulation on the host's processors as a Lightning strategy (Sekiyama et al. 2017)."""

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.arguments import checked
from retime.mechanisms.capabilities import Mechanism, refuse
from retime.mechanisms.ddp import BucketReduction, HostReductionReport
from retime.mechanisms.no_effect import NoEffectWarning
from retime.strategies.support.ddp_arguments import MegaBytes, StartMethod, given
from retime.strategies.support.ddp_hooks import hook_was_not_asked_for
from retime.strategies.support.lightning_package import LightningOnly
from retime.strategies.support.reduction import ReducerOfChoice
from retime.strategies.support.reporting_launcher import ReportsAcrossProcesses


class CPUAccumulateStrategy(ReducerOfChoice, LightningOnly, ReportsAcrossProcesses):
    """``ddp`` whose gradients the host's processors add up, in memory that the ranks of a machine share.

    Each bucket leaves for host memory as soon as the backward pass has filled it, every rank adds its part of it up,
    and the sum comes back while earlier layers are still under way. Between machines one rank of each sends that
    machine's sum through gloo. It pays where ranks have no fast link of their own: on processors, and on devices
    without NVLink or peer-to-peer copies.

    Each element is added up in the order of the ranks, so results are the same in every run; on two ranks they are
    those of ``ddp`` bit by bit, on more they may round differently. Half precision is added up in float32.

    All arguments are those of :class:`lightning.pytorch.strategies.DDPStrategy` and of the ``DistributedDataParallel``
    that it makes, whose further ones are taken too. A communication hook is refused. With one process there is nothing
    to add up: it trains as ``ddp`` does, with one ``NoEffectWarning``.
    """

    strategy_name = "cpu_accumulate_ddp"
    mechanisms = (Mechanism.HOST_REDUCTION,)
    reduce_on = "host"

    @checked
    def __init__(
        self,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: StartMethod = "popen",
        bucket_cap_mb: MegaBytes | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool | None = None,
        accelerator: Accelerator | str | None = None,
        parallel_devices: list[Any] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        if ddp_comm_hook is not None or ddp_comm_state is not None:
            refuse(Mechanism.HOST_REDUCTION, [Mechanism.USERS_HOOK])
        super().__init__(
            **given(
                ddp_comm_wrapper=ddp_comm_wrapper,
                model_averaging_period=model_averaging_period,
                process_group_backend=process_group_backend,
                timeout=timeout,
                start_method=start_method,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                gradient_as_bucket_view=gradient_as_bucket_view,
                broadcast_buffers=broadcast_buffers,
                accelerator=accelerator,
                parallel_devices=parallel_devices,
                cluster_environment=cluster_environment,
                checkpoint_io=checkpoint_io,
                precision_plugin=precision_plugin,
            ),
            **ddp_kwargs,
        )
        self._reduction: BucketReduction | None = None
        self._last_report = HostReductionReport()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, has the counts; it sums in a fit of its own."""
        return super().__getstate__() | {"_reduction": None, "_last_report": self.report()}

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.world_size > 1 and self._reduction is None:
            raise RuntimeError(
                hook_was_not_asked_for("training would be that of plain ddp", "use strategy='ddp' meanwhile")
            )

    def register_hooks(self) -> None:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        self._end()
        reducer = self.make_reducer(model)
        if reducer is None:
            text = f"strategy={self.strategy_name!r} has no effect: with one process there are no gradients to add up"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
            super().register_hooks()
            return
        self._reduction = BucketReduction(
            model, reducer, name="accumulation on the processors", instead="use strategy='ddp'"
        )

    def teardown(self) -> None:
        super().teardown()
        if self._reduction is not None:
            self._end()
            rank_zero_info(f"retime: {self._last_report}")

    def _end(self) -> None:
        self._last_report = self.report()
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.close(failed=sys.exc_info()[0] is not None)

    def report(self) -> HostReductionReport:
        """What was added up so far, and where."""
        return self._last_report if self._reduction is None else self._reduction.report()

    def take_report(self, report: HostReductionReport) -> None:
        self._last_report = report
