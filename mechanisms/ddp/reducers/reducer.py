"""What sums gradients over the ranks; where it does is a reducer's own affair."""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Reducer"]


class Reducer(Protocol):
    """Sums tensors over the ranks while the backward pass goes on; all ranks start the same ones in the same order."""

    def start(self, key: int, values: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to replace ``values``, shape ``(n,)``, by their sum, which is the future's value.

        Whoever wants a mean has scaled them (:mod:`retime.mechanisms.ddp.mean`), as DDP does.

        Args:
            key: of values that come again, such as a bucket's index. A reducer may keep memory for them, so those of
                the last call with the same key must have arrived.
            values: on the device.
        """

    def close(self) -> None:
        """Give back what was made for this; when nothing is on its way."""
