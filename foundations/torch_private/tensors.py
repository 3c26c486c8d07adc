"""Private names of tensors: version counters, hooks, views, subclasses and torch functions.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private import attribute, needed_by

# Private names of storages and their memory.
#
# All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).

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


version_of: Callable[[Tensor], int] = attribute(
    Tensor, "_version", "fusion, offloading and the memory budget's dry run, to see writes into tensors,"
)
"""How often a tensor's memory was written into in place; views count together."""

with needed_by("pipelines, whose received tensors take the place of those that a checkpoint has saved,"):
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter as kept_version
"""A context in which writes into a tensor do not count as such."""

base_of: Callable[[Tensor], Tensor | None] = attribute(
    Tensor, "_base", "the memory budget's dry run, to see what a step leaves in tensors from outside,"
)
"""The tensor that this one is a view of, or None."""

tensor_hooks: Callable[[Tensor], dict[int, Callable[..., Any]] | None] = attribute(
    Tensor, "_backward_hooks", "the memory budget and out-of-order weight gradients, to respect a tensor's hooks,"
)
"""What ``register_hook`` was given, or None."""

post_accumulate_hooks: Callable[[Tensor], dict[int, Callable[..., Any]] | None] = attribute(
    Tensor, "_post_accumulate_grad_hooks", "backward fusion and the memory budget, to see who else reads gradients,"
)
"""What ``register_post_accumulate_grad_hook`` was given, or None."""

_form: Any = Tensor  # whose descriptors have no types
with needed_by("forward fusion, whose updates need not run when somebody asks for a parameter's hooks,"):
    reads_of_hooks: tuple[Any, ...] = (_form._backward_hooks.__get__, _form._post_accumulate_grad_hooks.__get__)
"""The torch functions that look at a tensor's hooks."""

with needed_by("backward fusion, for gradients that have a form and no memory,"):
    make_wrapper_subclass = Tensor._make_wrapper_subclass
    disabled_torch_function = torch._C._disabled_torch_function_impl
"""A tensor of a subclass with sizes and no memory; and the ``__torch_function__`` that leaves all to the dispatcher."""

with needed_by("forward fusion, whose own reads of a parameter are none that must wait for its update,"):
    without_torch_functions = torch._C.DisableTorchFunction
    without_subclass_functions = torch._C.DisableTorchFunctionSubclass
"""Contexts in which no ``__torch_function__`` is called; the second leaves modes on."""

with needed_by("counting the bytes of sparse tensors"):
    sparse_values, sparse_indices = Tensor._values, Tensor._indices
"""The two parts of a sparse tensor, coalesced or not."""

with needed_by("offloading, to give back a tensor with the negative bit,"):
    neg_view = torch._neg_view
"""A view whose values are the negative ones."""

with needed_by("two streams, for linear layers on sequences,"):
    unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = torch.ops.aten._unsafe_view
"""Another shape of a tensor that nobody else has, which autograd takes for no view."""
