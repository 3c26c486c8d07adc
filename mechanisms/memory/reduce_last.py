"""Gradients of a batch in parts leave once: with the backward pass of its last part (moDNN, section 6.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

__all__ = ["ReduceLast"]


class ReduceLast:
    """Switches the reductions of a DistributedDataParallel model on for one part of each batch.

    ::

        reduce.begin(weights)
        for part, weight in zip(parts, weights):
            with alone(model) if reduce.next() else nullcontext():
                loss = step(model, part)
            if weight:
                (loss * weight).backward()
        reduce.end()

    Inside of ``model.no_sync()`` no part reduces. Buffers are sent once a batch, as without parts.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._wanted: bool | None = None
        self._part = self._last = 0

    def begin(self, weights: Sequence[float]) -> None:
        """A batch begins.

        Args:
            weights: of its parts. Those of weight 0 have no backward pass, so they cannot be the one that reduces.
        """
        self.end()
        self._wanted = self._model.require_backward_grad_sync
        self._part, self._last = -1, max(index for index, weight in enumerate(weights) if weight)

    def next(self) -> bool:
        """The forward pass of the next part begins.

        Returns:
            Whether the batch's gradients have left: then this part must not go through DDP's forward pass, which would
            begin the next batch and talk to ranks that have no such part.
        """
        if self._wanted is None:
            return False
        self._part += 1
        self._model.require_backward_grad_sync = self._wanted and self._part == self._last
        return self._part > self._last

    def end(self) -> None:
        """The batch is over, or will not be finished."""
        if self._wanted is None:
            return
        self._model.require_backward_grad_sync = self._wanted
        self._wanted = None
