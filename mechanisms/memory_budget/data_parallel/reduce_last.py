"""Gradients of a batch in parts leave once: with the backward pass of its last part (moDNN, section 6.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.memory_budget.data_parallel.alone import alone

__all__ = ["ReduceLast"]


class ReduceLast:
    """Switches the reductions of a DistributedDataParallel model on for one part of each batch.

    ::

        reduce.begin(weights)
        for part, weight in zip(parts, weights):
            with reduce.part():
                loss = step(model, part)
            if weight:
                (loss * weight).backward()

    Inside of ``model.no_sync()`` no part reduces. Buffers are sent once a batch, as without parts.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._wanted: bool | None = None
        self._part = self._last = self._parts = 0

    def begin(self, weights: Sequence[float]) -> None:
        """A batch begins.

        Args:
            weights: of its parts. Those of weight 0 have no backward pass, so they cannot be the one that reduces.
        """
        self.end()
        self._wanted = self._model.require_backward_grad_sync
        self._part, self._parts = -1, len(weights)
        self._last = max(index for index, weight in enumerate(weights) if weight)

    @contextmanager
    def part(self) -> Iterator[None]:
        """Around the forward pass of the next part; the batch is over with that of the last one, or when one fails."""
        if self._wanted is None:
            yield
            return
        self._part += 1
        self._model.require_backward_grad_sync = self._wanted and self._part == self._last
        over = self._part > self._last  # DDP's forward pass would begin the next batch: other ranks have no such part
        try:
            with alone(self._model, watch=False) if over else nullcontext():
                yield
        except BaseException:
            self.end()
            raise
        if self._part == self._parts - 1:  # now, while the caller's no_sync() is still open
            self.end()

    def sent_buffers(self) -> None:
        """The batch begins again, after its first part: other ranks do not send their buffers a second time."""
        if self._last == 0:  # the forward pass of the part that reduces would send those of the next batch
            self._model.require_forward_param_sync = False

    def end(self) -> None:
        """The batch is over, or will not be finished."""
        if self._wanted is None:
            return
        self._model.require_backward_grad_sync = self._wanted
        self._wanted = None
