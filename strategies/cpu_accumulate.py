"""Gradient accumulation on the host's processors as a Lightning strategy (Sekiyama et al. 2017)."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.messages import warn_no_effect
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReductionReport, HostUpdate, HostUpdateReport
from retime.strategies.support.base import (
    DDPArguments,
    HostReductionMixin,
    LightningOnly,
    hook_was_not_asked_for,
    refuse_users_hook,
)
from retime.strategies.support.lightning_private import timeout_of


class CPUAccumulateStrategy(HostReductionMixin, LightningOnly, DDPArguments):
    """``ddp`` whose gradients the host's processors sum in memory that the ranks of a machine share.

    Each bucket is copied to host memory as soon as the backward pass has filled it, every rank sums a part of it,
    and the sum is copied back during the backward pass of earlier layers. Between machines one rank of each sends its
    machine's sum through gloo. It pays where ranks have no fast link: on CPUs, and on devices without NVLink or
    peer-to-peer copies.

    Each element is summed in the order of the ranks, so results are the same in every run; on two ranks they equal
    those of ``ddp`` bit for bit, on more they may round differently. Half precision is summed in float32.

    With ``update_on_host=True`` the host applies the update too (moDNN, section 6.2): each rank updates some of the
    parameters and reads the others' weights, so that a machine holds the optimizer's state once, not once per rank.
    Results do not change, checkpoints are whole and can be loaded by ``ddp``, and when the fit ends every
    rank gets the whole state. Until then ``optimizer.state`` holds this rank's part, and ``optimizer.state_dict()`` and
    copies of the optimizer are refused. If an optimizer cannot run parameter by parameter, or ranks share no memory,
    every rank updates all, with one ``NoEffectWarning``.

    Args:
        update_on_host: divide updates among the ranks of a machine; on processors only.

    All other arguments are those of :class:`lightning.pytorch.strategies.DDPStrategy` and of the
    ``DistributedDataParallel`` that it makes, whose further ones are taken too. A communication hook is refused. With
    one process there is nothing to sum: it trains as ``ddp`` does, with one ``NoEffectWarning``.
    """

    strategy_name = "cpu_accumulate_ddp"
    reduce_on = "host"

    @checked
    def __init__(self, *, update_on_host: bool = False, **ddp: Any) -> None:
        super().__init__(**ddp)
        refuse_users_hook(Mechanism.HOST_REDUCTION, ddp)
        self._update_on_host = update_on_host
        self._updates: dict[Optimizer, HostUpdate] = {}
        self._updated = HostUpdateReport()
        """Report of optimizers that were swapped for others."""
        self._last_report: HostReductionReport = HostReductionReport()

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Mechanisms that this strategy brings along."""
        return (Mechanism.HOST_REDUCTION, *([Mechanism.HOST_UPDATE] if self._update_on_host else []))

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, has the counts."""
        return super().__getstate__() | {"_updates": {}, "_last_report": self.report()}

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._reduction is not None:
            updates = ", and the updates are divided" if self._update_on_host else ""
            rank_zero_info(f"retime: gradients are added up on the host, {self._reduction.report().how}{updates}")
        elif self.world_size > 1:
            raise RuntimeError(
                hook_was_not_asked_for("training would be that of plain ddp", "use strategy='ddp' meanwhile")
            )

    def register_hooks(self) -> None:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        self.end_reduction()
        if self._update_on_host and self.root_device.type != "cpu":
            raise ValueError(f"update_on_host=True is for processors, not for {self.root_device}: leave it out")
        reducer = self.make_reducer(model)
        if reducer is None:
            text = f"strategy={self.strategy_name!r} has no effect: with one process there are no gradients to add up"
            text += " and no updates to divide" if self._update_on_host else ""
            warn_no_effect(text)
            super().register_hooks()
            return
        self._reduction = BucketReduction(
            model, reducer, name="accumulation on the processors", instead="use strategy='ddp'"
        )

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._update_on_host and self._reduction is not None and optimizer not in self._updates:
            self._divide(optimizer, self._reduction)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _divide(self, optimizer: Optimizer, reduction: BucketReduction) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        for swapped in [key for key in self._updates if key not in self.optimizers]:
            update = self._updates.pop(swapped)
            update.remove()
            self._updated = self._updated.beside(update.report())
        group = self.model.process_group
        self._updates[optimizer] = HostUpdate(optimizer, reduction.parameters, group, timeout_of(self))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State; where updates are divided, whole on the first rank, which writes checkpoints, and empty on others."""
        update = self._updates.get(getattr(optimizer, "optimizer", optimizer))
        if update is None or not update.active:
            return super().optimizer_state(optimizer)
        state = update.state_dict()
        return state if self.is_global_zero else {}

    def teardown(self) -> None:
        failed = sys.exc_info()[0] is not None
        try:
            if failed and self._updates and self._reduction is not None:
                # others that wait for gradients fail too, and put the state together
                self._reduction.close(failed=True)
            for update in self._updates.values():
                update.remove(failed=failed)
        except BaseException:
            for update in self._updates.values():
                update.remove(failed=True)
            raise
        finally:
            was_on = self._reduction is not None
            super().teardown()
            if was_on:
                rank_zero_info(f"retime: {self._last_report.headline}")

    def end_reduction(self) -> None:
        self._last_report = self.report()
        self._updates.clear()
        self._updated = HostUpdateReport()
        super().end_reduction()

    def report(self) -> HostReductionReport:
        """Report of sums so far, and of their place; of what was updated together, and of its state on this rank."""
        if self._reduction is None:
            return self._last_report
        divided = [update.report() for update in self._updates.values()]
        update = reduce(HostUpdateReport.beside, divided, self._updated)
        return replace(self._reduction.report(), update=update if self._update_on_host else None)
