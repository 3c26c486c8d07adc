"""Private names of storages and their memory.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from retime.foundations.torch_private.missing import attribute, needed_by

__all__ = ["empty_host_cache", "is_functorch_wrapped", "lazy_clone", "storage_address", "storage_use_count"]

storage_address: Callable[[torch.UntypedStorage], int] = attribute(
    torch.UntypedStorage, "_cdata", "telling storages apart (offloading, dry runs, out-of-order weight gradients)"
)
"""A number that all tensors on one storage agree about as long as it lives: the address of its bookkeeping."""

with needed_by("forward fusion, to see that something shares a parameter's memory,"):
    storage_use_count = torch._C._storage_Use_Count
"""How many owners a storage has, the handle in Python included; takes its address."""

with needed_by("offloading, which leaves the tensors of torch.func's transforms alone,"):
    is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor stands for another one inside of a transform, and has no storage to ask for."""

with needed_by("the memory budget's dry run, whose copies of what a step may write into cost no memory,"):
    lazy_clone: Callable[[Tensor], Tensor] = torch._lazy_clone
"""A copy that shares its memory until one of the two is written into."""


def _nothing_cached() -> None:
    """A torch that knows no device has no locked pages."""


empty_host_cache: Callable[[], None] = _nothing_cached
if torch.version.cuda is not None:
    with needed_by("offloading from CUDA devices, to give locked host memory back,"):
        empty_host_cache = torch._C._host_emptyCache
"""Give the locked pages back to the system that torch keeps after their tensors are gone."""
