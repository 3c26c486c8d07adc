"""All gradients of a model go through host memory.

reduction = HostReduction(model)     # a DistributedDataParallel model; all its ranks do this
...
reduction.close()
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.ddp.comm_hook import comm_hook_of
from retime.mechanisms.ddp.mean import scale
from retime.mechanisms.ddp.reducers import HostReducer
from retime.mechanisms.torch_private import GradBucket

__all__ = ["HostReduction"]


class HostReduction:
    """Takes a model's communication hook, and gives every bucket to a :class:`HostReducer`.

    Where the number of ranks is a power of two, gloo's sum has the same bits as without the hook on CPUs.

    Args:
        model: on one device; all of its ranks make one of these.
        timeout: of a reduction; None is torch's default.

    Raises:
        ValueError: the model lies on several devices, or has a communication hook.
    """

    def __init__(self, model: DistributedDataParallel, timeout: timedelta | None = None) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise ValueError(f"reductions in host memory take a model on one device, not on {len(devices)}")
        self._slot = comm_hook_of(model)
        self._slot.take(self, "a reduction in host memory", "use reduce_on='device', or leave out the other hook")
        self._ranks = dist.get_world_size(model.process_group)
        try:
            self._reducer = HostReducer(next(iter(devices), "cpu"), model.process_group, timeout)
        except BaseException:  # another rank that has died, say: buckets must not come here
            self._slot.give_back(self)
            raise
        self._closed = False

    @property
    def bytes_out(self) -> int:
        """Bytes sent to the host so far."""
        return self._reducer.bytes_out

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to replace a bucket's gradients by their mean over the ranks."""
        values = bucket.buffer()
        scale(values, self._ranks, divide=True)
        return self._reducer.start(bucket.index(), values)

    def close(self) -> None:
        """Leave reductions to DDP again; when no backward pass runs."""
        if not self._closed:
            self._closed = True
            self._slot.give_back(self)
            self._reducer.close()
