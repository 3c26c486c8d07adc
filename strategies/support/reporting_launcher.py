"""Reports of fits that run in processes of their own: rank 0 returns its report with the weights."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from typing import Any

from lightning.pytorch import Trainer

from retime.strategies.support.lightning_private import Launcher, ProcessLauncher, start_method_of
from retime.strategies.support.lost_ranks import NamesLostRanks

_KEY = "retime_report"


class ReportsAcrossProcesses(NamesLostRanks):
    """``ddp`` whose ``report()`` tells of the fit after spawned and forked processes have ended, too."""

    @abstractmethod
    def report(self) -> Any:
        """What was done so far."""

    @abstractmethod
    def take_report(self, report: Any) -> None:
        """Let :meth:`report` return rank 0's report from now on, until the next fit."""

    def choose_launcher(self, launcher: Launcher | None) -> Launcher | None:
        if isinstance(launcher, ProcessLauncher):
            return _ReportingLauncher(self, start_method=start_method_of(self))
        return launcher


class _ReportingLauncher(ProcessLauncher):
    """Lightning's launcher, with one more thing among its results."""

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        strategy = trainer.strategy
        assert isinstance(strategy, ReportsAcrossProcesses)
        # as bytes: Lightning would look for tensors inside of it, to move them to the CPU
        return super().get_extra_results(trainer) | {_KEY: pickle.dumps(strategy.report())}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        strategy = trainer.strategy
        assert isinstance(strategy, ReportsAcrossProcesses)
        strategy.take_report(pickle.loads(extra[_KEY]))
