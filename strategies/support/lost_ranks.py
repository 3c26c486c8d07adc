"""What a fit over several ranks does where one of them is gone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from retime.foundations.ddp import RankProcesses
from retime.strategies.support.lightning_private import MomentsOfDDP, end_behind_batch_on_sigterm


class NamesLostRanks(MomentsOfDDP):
    """``ddp`` whose errors name the rank that ended, and which SIGTERM ends on any rank, also where others wait."""

    _processes: RankProcesses | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, learns the processes in a fit of its own."""
        return super().__getstate__() | {"_processes": None}

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.world_size > 1 and dist.is_initialized():
            self._forget_processes()
            self._processes = RankProcesses()
            end_behind_batch_on_sigterm(trainer)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        text = None if self._processes is None else self._processes.explain(exception)
        if text is not None:
            exception.args = (text,)

    def teardown(self) -> None:
        self._forget_processes()
        super().teardown()

    def _forget_processes(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()
