"""The memory that a budget counts beside what a step makes, and what freed memory may be kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retime.mechanisms.memory.pool import FreedMemory
from retime.mechanisms.storages import strided_bytes, tensors_in

__all__ = ["MemoryLimit"]


class MemoryLimit:
    """Keeps a process to what its plans need.

    Args:
        model, optimizers: what a step trains.
        hidden_bytes: of tensors that nothing in Python holds: freed memory leaves room for them.

    Attributes:
        freed: what happens to freed memory.
        hidden_bytes: as given; may be set anew.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], hidden_bytes: int = 0) -> None:
        self._model, self._optimizers, self.hidden_bytes = model, optimizers, hidden_bytes
        self.freed = FreedMemory(next(model.parameters()).device)

    def limit(self, batch: Any, nbytes: int) -> None:
        """Freed memory is kept for the next tensors as far as there is room for it in ``nbytes``."""
        self.freed.hold(max(0, nbytes - self.hidden_bytes), self._between_steps(batch))

    def needed_bytes(self, batch: Any) -> int | None:
        """What is there between steps, and the most that tensors held beside since the first step began.

        None where it cannot be measured.
        """
        more = self.freed.peak_bytes()
        return None if more is None else more + self.hidden_bytes + strided_bytes(self._between_steps(batch))

    def _between_steps(self, batch: Any) -> list[Tensor]:
        states = [tensors_in(list(optimizer.state.values())) for optimizer in self._optimizers]
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return [*self._model.parameters(), *self._model.buffers(), *gradients, *chain(*states), *tensors_in(batch)]
