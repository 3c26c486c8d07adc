"""Gradients are summed where they are, by the all-reduce that DistributedDataParallel itself uses."""

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from retime.foundations.arguments import Timeout, checked
from retime.foundations.ddp.own_group import close_group, own_group

__all__ = ["DeviceReducer", "OwnGroupsReducer"]


class DeviceReducer:
    """All-reduces in a process group, which stays its owner's.

    Args:
        group: None: all ranks. Do not keep a reducer in what runs when an all-reduce has ended: the last reference to a
            group may then go in a thread of that group, which cannot end in its own thread.
    """

    @checked
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> torch.futures.Future[Tensor]:
        """Begin to replace ``values`` by their sum over the ranks."""
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def close(self) -> None:
        """Nothing was made."""

    def abort(self) -> None:
        """Nothing was made."""


class OwnGroupsReducer:
    """All-reduces in process groups of its own.

    Of its own, so that nothing else (buffers, metrics, a user's barrier) queues behind them; the urgent ones have
    another, so that they do not queue behind the bulk either.

    Args:
        group: whose ranks; None: all. Each of them makes one of these.
        timeout: of a sum; None is torch's default.
    """

    @checked
    def __init__(self, group: dist.ProcessGroup | None = None, timeout: Timeout | None = None) -> None:
        self._groups = [own_group(group, timeout=timeout) for _ in range(2)]
        self._reducers = [DeviceReducer(one) for one in self._groups]

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> torch.futures.Future[Tensor]:
        """Begin to replace ``values`` by their sum over the ranks."""
        return self._reducers[urgent].start(key, values)

    def close(self) -> None:
        """Give the process groups back."""
        groups, self._groups, self._reducers = self._groups, [], []
        for group in groups:
            close_group(group)

    def abort(self) -> None:
        """Give the process groups back."""
        self.close()
