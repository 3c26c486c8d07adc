"""What a rank holds while it trains."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from retime.foundations.measure import status_bytes

__all__ = ["HeldState"]


class HeldState(Callback):
    """The most at the end of any step.

    Attributes:
        state: bytes of the optimizers' states.
        resident: bytes of the process.
    """

    def __init__(self) -> None:
        self.state = self.resident = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # ZeroRedundancyOptimizer has its part in an optimizer of its own, `optim`
        optimizers: list[Any] = [getattr(optimizer, "optim", optimizer) for optimizer in trainer.optimizers]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        held = sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))
        self.state, self.resident = max(self.state, held), max(self.resident, status_bytes("VmRSS"))
