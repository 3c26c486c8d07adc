"""The ranks' mean, with the bits of DistributedDataParallel's own: it scales gradients first, and sums them then.

It divides a gradient that was in its bucket before the backward pass. All others it multiplies by the rounded
reciprocal while it copies them there. With 2, 4, 8, ... ranks both give the same bits; with others they do not.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp.reducers import Reducer, ScalingReducer
from retime.foundations.torch_private import GradBucket

__all__ = ["MeanOfBuckets", "scale", "start_mean"]


def scale(values: Tensor, ranks: int, *, divide: bool) -> None:
    """Divide ``values`` by the number of ranks in place, or multiply them by its rounded reciprocal."""
    if divide:
        values.div_(ranks)
    else:
        values.mul_(1.0 / ranks)


def start_mean(
    reducer: Reducer, key: Hashable, values: Tensor, ranks: int, *, divide: bool, urgent: bool = False
) -> torch.futures.Future[Tensor]:
    """Begin to replace ``values`` by their mean over the ranks; a reducer divides by 2, 4, 8, ... itself, if it can."""
    if isinstance(reducer, ScalingReducer) and is_exact(ranks):
        return reducer.start_scaled(key, values, 1.0 / ranks, urgent=urgent)
    scale(values, ranks, divide=divide)
    return reducer.start(key, values, urgent=urgent)


def is_exact(ranks: int) -> bool:
    """Whether the reciprocal of this number is exact."""
    return ranks & (ranks - 1) == 0


class MeanOfBuckets:
    """Scales a model's buckets as its DistributedDataParallel would.

    By the time that a communication hook runs, all gradients are in their buckets. Where it matters which of them were
    before, each parameter gets a hook that runs when its gradient has been accumulated, just before DDP moves it. These
    hooks go with the model.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._places: dict[int, int] = {}
        self._follows = False
        if not is_exact(dist.get_world_size(model.process_group)):
            self.follow(model)

    def follow(self, model: DistributedDataParallel) -> None:
        """Note from now on which gradients are in their buckets before DDP moves them."""
        if self._follows or not model.gradient_as_bucket_view:
            return
        self._follows = True
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_note, self._places))  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        weakref.finalize(model, _remove, handles)

    def start(self, bucket: GradBucket, reducer: Reducer, ranks: int) -> torch.futures.Future[Tensor]:
        """Begin to replace what a full bucket holds by its mean over so many ranks."""
        if not self._places:
            return start_mean(reducer, bucket.index(), bucket.buffer(), ranks, divide=False)
        self._divide(bucket, ranks)
        return reducer.start(bucket.index(), bucket.buffer())

    def _divide(self, bucket: GradBucket, ranks: int) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            scale(gradient, ranks, divide=self._places.get(id(parameter)) == gradient.data_ptr())


def _note(places: dict[int, int], parameter: Tensor) -> None:
    """Where a gradient is before DDP sees it; by identity, as the table must not hold what holds the hook."""
    if parameter.grad is not None:
        places[id(parameter)] = parameter.grad.data_ptr()


def _remove(handles: list[object]) -> None:
    for handle in handles:
        handle.remove()  # type: ignore[attr-defined]
