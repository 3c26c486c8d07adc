"""A peer that sends gradients in the order in which the next forward pass needs them, as BytePS and ByteScheduler do.

Peng et al. 2019 (ByteScheduler), section 4: gradients are cut into partitions, of which the most urgent that is there
leaves next. No weight gradient is deferred. All-reduces have to come in one order on all ranks: rank 0 chooses.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp import close_group, own_group
from retime.strategies import OOODataParallelStrategy

PARTITION_BYTES = 4_096_000
"""BytePS's default."""
_END = -1


@dataclass
class _Bucket:
    parts: list[Tensor]
    values: Tensor
    done: Future[Tensor]


class PriorityReducer:
    """Sums partitions of buckets, the most urgent first: DDP's highest number is that of the first layers.

    Args:
        partition_bytes: the most that is sent at once.
    """

    def __init__(self, partition_bytes: int = PARTITION_BYTES) -> None:
        self._partition_bytes = partition_bytes
        self._group = own_group()
        self._buckets: dict[int, _Bucket] = {}
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._send, name="retime-priorities", daemon=True)
        self._thread.start()

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> Future[Tensor]:
        """Begin to replace the values of the bucket with this number, shape ``(n,)``, by their sum over the ranks."""
        assert isinstance(key, int)
        parts = list(values.chunk(-(-values.nbytes // self._partition_bytes)))
        bucket = _Bucket(parts, values, Future())
        with self._changed:
            self._buckets[key] = bucket
            self._changed.notify()
        return bucket.done

    def close(self) -> None:
        """End the thread and give the process group back; when nothing is on its way."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()
        close_group(self._group)

    def abort(self) -> None:
        """Give the process group back; the thread ends with the process."""
        close_group(self._group)

    def _send(self) -> None:
        try:
            while (number := self._chosen()) != _END:
                with self._changed:
                    while number not in self._buckets:
                        self._changed.wait()
                    bucket = self._buckets[number]
                dist.all_reduce(bucket.parts.pop(0), group=self._group)
                if not bucket.parts:
                    with self._changed:
                        del self._buckets[number]
                    bucket.done.set_result(bucket.values)
        except Exception as error:  # another rank is gone: whoever waits for a gradient is told
            for bucket in self._buckets.values():
                bucket.done.set_exception(error)  # type: ignore[arg-type]

    def _chosen(self) -> int:
        """The number of the bucket of which all ranks send a partition now."""
        choice = torch.full((1,), _END)
        if dist.get_rank() == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._buckets or self._ending)
                choice.fill_(max(self._buckets, default=_END))
        dist.broadcast(choice, 0, group=self._group)
        return int(choice)


class PriorityDataParallel(OOODataParallelStrategy):
    """`ddp` with such a reducer, buckets of about one layer and updates that wait for their own gradients only."""

    def __init__(self, bucket_cap_mb: float) -> None:
        super().__init__(k=0, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)

    def make_reducer(self, model: DistributedDataParallel) -> Any:
        return PriorityReducer()
