"""Gradients are summed where they are, by the all-reduce that DistributedDataParallel itself uses."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["DeviceReducer"]


class DeviceReducer:
    """All-reduces in a process group, which stays its owner's.

    Args:
        group: None: all ranks. Do not keep a reducer in what runs when an all-reduce has ended: the last reference to a
            group may then go in a thread of that group, which cannot end in its own thread.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def start(self, key: int, values: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to replace ``values`` by their sum over the ranks."""
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def close(self) -> None:
        """Nothing was made."""
