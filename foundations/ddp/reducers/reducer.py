"""What sums gradients over the ranks; where it does is a reducer's own affair."""

from collections.abc import Hashable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Reducer", "ScalingReducer"]


@runtime_checkable
class Reducer(Protocol):
    """Sums tensors over the ranks while the backward pass goes on.

    What holds between a reducer and the owner of DDP's communication hook that was given it:

    * Who divides: the owner, before :meth:`start`, as DDP does (``ddp/mean.py``). A reducer only adds, unless it
      is a :class:`ScalingReducer` and the factor is exact.
    * What it gets: a bucket, or a piece of one: one-dimensional, contiguous, of the gradients' dtype, on the model's
      device. The sum is written there, and nobody else touches it before the future is done.
    * How it writes: with any operation of torch. Those raise a version counter, and who puts gradients aside (forward
      fusion) takes that for a change by somebody else. So an owner that lets gradients be put aside while a sum is on
      its way gives the reducer ``values.data``, which has a counter of its own (``ddp/reductions.py``).
    * Order: all ranks start the same ones in the same order, in one thread at a time. Urgent ones may overtake others,
      if they do on every rank.
    * The end: its owner closes it, once, when nothing is on its way, or aborts it after a failure.

    Inside of the wrapper's ``join()`` owners use the wrapper's own group instead, where ranks without batches answer.
    """

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> torch.futures.Future[Tensor]:
        """Begin to replace ``values``, shape ``(n,)``, by their sum.

        Args:
            key: of values that come again, such as a bucket's index. A reducer may keep memory for them, so those of
                the last call with the same key must have arrived.
            values: on the model's device.
            urgent: the next forward pass needs these first.

        Returns:
            Done when the sum is there, with ``values``, or with the error; in any thread. On CUDA the stream of whoever
            waits for it waits too.
        """

    def close(self) -> None:
        """Give back what was made for this; when nothing is on its way."""

    def abort(self) -> None:
        """The same after a failure: wait for nothing. What is on its way may never be done."""


@runtime_checkable
class ScalingReducer(Reducer, Protocol):
    """A reducer that can scale what it sums, so that memory is gone through once less."""

    def start_scaled(
        self, key: Hashable, values: Tensor, scale: float, *, urgent: bool = False
    ) -> torch.futures.Future[Tensor]:
        """As :meth:`start`, each rank's values times ``scale``."""
