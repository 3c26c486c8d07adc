"""Private names of ``DistributedDataParallel``: attributes that only a wrapped model has, so they are asked for in use.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.torch_private.missing import needed_by, read_private

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "GradBucket",
    "divides_by_ranks_left",
    "has_rebuilt_buckets",
    "joins_uneven_inputs",
]

with needed_by("fusion, out-of-order data parallel and memory budgets under DDP, which reduce its buckets,"):
    from torch._C._distributed_c10d import GradBucket
"""What a communication hook of DDP gets: gradients of one bucket, flat, and its number. Its public name has no type."""

with needed_by("memory budgets under DDP, which refuse collectives that a training step calls itself,"):
    torch.ops._c10d_functional.all_reduce  # noqa: B018
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Of the operations that ranks run together, as a mode of the dispatcher meets them."""


def has_rebuilt_buckets(model: DistributedDataParallel) -> bool:
    """Whether DDP has put its buckets in the order in which gradients arrived, which it does after one step.

    Raises:
        PrivateNameError: this torch's DDP has no such attribute.
    """
    feature = "out-of-order data parallel and memory budgets under DDP, to know when gradient buckets are final,"
    return bool(read_private(model, "_has_rebuilt_buckets", feature))


def joins_uneven_inputs(model: DistributedDataParallel) -> bool:
    """Whether the model is inside of its ``join()`` context: ranks may run out of batches before others.

    Raises:
        PrivateNameError: this torch's DDP has no such attribute.
    """
    feature = "out-of-order data parallel, to keep DDP's own order where ranks join early,"
    return bool(read_private(read_private(model, "_join_config", feature), "enable", feature))


def divides_by_ranks_left(model: DistributedDataParallel) -> bool:
    """Whether gradients are divided by the number of ranks that have batches: in ``join()``, if the user asked for it.

    A wrapper that is not the first in a ``Join`` of several objects does not count ranks, and divides by all.

    Raises:
        PrivateNameError: this torch's DDP has no such attribute.
    """
    if not joins_uneven_inputs(model):
        return False
    feature = "communication hooks, to divide gradients by the ranks that have batches,"
    first = read_private(read_private(model, "_join_config", feature), "is_first_joinable", feature)
    return bool(first) and not read_private(model, "_divide_by_initial_world_size", feature)
