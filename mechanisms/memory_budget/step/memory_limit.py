"""The memory that a budget counts beside what a step makes, and what freed memory may be kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool import FreedMemory
from retime.foundations.measure import PeakWatch
from retime.foundations.storages import strided_bytes, tensors_in

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
        device = next(model.parameters()).device
        self.freed = FreedMemory(device)
        self._process = _watched_process() if device.type == "cpu" else None
        self._model_bytes = self._standing_bytes = strided_bytes(self._between_steps(()))

    def limit(self, batch: Any, nbytes: int) -> None:
        """Freed memory is kept for the next tensors as far as there is room for it in ``nbytes``."""
        self.freed.hold(max(0, nbytes - self.hidden_bytes), self._between_steps(batch))

    def needed_bytes(self, batch: Any) -> int | None:
        """What is there between steps, and the most that tensors held beside since the first step began.

        None where it cannot be measured.
        """
        more = self.freed.peak_bytes()
        return None if more is None else more + self.hidden_bytes + strided_bytes(self._between_steps(batch))

    def grown_bytes(self) -> int:
        """The most that the process has grown by so far, with the model that was there; 0 where it cannot be told."""
        return 0 if self._process is None else self._process.read() - self._process.begin_bytes + self._model_bytes

    def begin_first_step(self, batch: Any) -> None:
        """From now on :meth:`allocated_bytes` counts."""
        self._standing_bytes = strided_bytes(self._between_steps(batch))
        self.freed.forget_peak()

    def allocated_bytes(self) -> int:
        """The most that tensors held since :meth:`begin_first_step`; 0 where it cannot be measured."""
        more = self.freed.peak_bytes()
        return 0 if more is None else more + self.hidden_bytes + self._standing_bytes

    def _between_steps(self, batch: Any) -> list[Tensor]:
        states = [tensors_in(list(optimizer.state.values())) for optimizer in self._optimizers]
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return [*self._model.parameters(), *self._model.buffers(), *gradients, *chain(*states), *tensors_in(batch)]


def _watched_process() -> PeakWatch | None:
    try:
        return PeakWatch()
    except (OSError, LookupError):  # no Linux, or a kernel that does not forget peaks
        return None
