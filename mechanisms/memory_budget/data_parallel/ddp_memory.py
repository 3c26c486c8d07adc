"""What DistributedDataParallel holds beside a model and its gradients: buckets, and what sums of them take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.cpu_pool import trim_heap
from retime.foundations.storages import strided_bytes
from retime.foundations.torch_private import has_rebuilt_buckets

__all__ = ["NewBuckets", "bucket_bytes", "buckets_of", "gloo_bytes", "reduction_bytes"]

_FIRST_BUCKET_BYTES = 2**20  # DDP's own: the first bucket is small, so that the network starts early
_SEGMENT_BYTES = 2**20  # the largest piece that gloo sends
_THREADS = 2  # of gloo, in a process group


def buckets_of(model: nn.Module | None) -> Literal["", "beside", "gradients"]:
    """What holds memory beside gradients; see :class:`~retime.mechanisms.memory_budget.dry_run.TrainingStep`."""
    if not isinstance(model, DistributedDataParallel):
        return ""
    return "gradients" if model.gradient_as_bucket_view else "beside"


def bucket_bytes(model: nn.Module | None) -> int:
    """Of all gradient buckets."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    return strided_bytes(one for one in model.parameters() if one.requires_grad)


def reduction_bytes(model: nn.Module | None) -> int:
    """What reductions of gradients allocate in this process's memory; see :func:`gloo_bytes`.

    NCCL's buffers are none of torch's, and count for no budget.
    """
    if not isinstance(model, DistributedDataParallel) or next(model.parameters()).device.type != "cpu":
        return 0
    if "gloo" not in dist.get_backend(model.process_group):
        return 0
    return gloo_bytes(bucket_bytes(model), int(model.bucket_bytes_cap), dist.get_world_size(model.process_group))


def gloo_bytes(gradient_bytes: int, cap_bytes: int, ranks: int) -> int:
    """What gloo allocates to sum gradients: two pieces of the largest bucket for each of its threads.

    It sums in a ring: each rank's share of a bucket in pieces of at most 1 MiB, two of which are under way. Each of
    its threads has a heap of its own, which keeps what the largest bucket took.

    Args:
        gradient_bytes: of all trained parameters.
        cap_bytes: DDP's ``bucket_cap_mb``, in bytes.
        ranks: that sum them.
    """
    largest = max(_sizes(gradient_bytes, cap_bytes), default=0)
    return _THREADS * 2 * _piece_bytes(largest, ranks) if ranks > 1 else 0


class NewBuckets:
    """Watches for the buckets that DDP makes after its first step, in the order in which gradients were ready.

    The memory of the first ones is given back to the system before the forward pass begins.

    Attributes:
        made: they are there.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._at_first = self.made = has_rebuilt_buckets(model)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around calls of the model."""
        if self.made:
            yield
            return
        hook = self._model.module.register_forward_pre_hook(self._look)
        try:
            yield
        finally:
            hook.remove()

    @property
    def since(self) -> bool:
        """They were made since this object was."""
        return self.made and not self._at_first

    def _look(self, module: nn.Module, inputs: object) -> None:
        if not self.made and has_rebuilt_buckets(self._model):
            self.made = True
            trim_heap()


def _sizes(total: int, cap: int) -> Iterator[int]:
    """Of the buckets, about: they end at whole parameters."""
    size = min(_FIRST_BUCKET_BYTES, cap)
    while total > 0:
        yield min(total, size)
        total -= size
        size = cap


def _piece_bytes(nbytes: int, ranks: int) -> int:
    pieces = max(-(-nbytes // _SEGMENT_BYTES), 2 * ranks)
    return -(-nbytes // (-(-pieces // ranks) * ranks))
