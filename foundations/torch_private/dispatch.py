"""Private names of torch's dispatcher: modes below autograd, fake tensors, operations and trees of tensors.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retime.foundations.torch_private.missing import attribute, needed_by

__all__ = [
    "FOREACH_ZERO",
    "LOCAL_SCALAR_DENSE",
    "TO_COPY",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "dispatch_mode_count",
    "schema_of",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_dispatch_modes",
]

with needed_by("the memory budget, whose dry run and probe see a step operation by operation,"):
    from torch.utils._python_dispatch import TorchDispatchMode
"""A context whose ``__torch_dispatch__`` gets every operation below autograd."""

with needed_by("the memory budget, which copies real tensors in the midst of a dry run,"):
    from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

    dispatch_mode_count = torch._C._len_torch_dispatch_stack
"""A context in which operations go past all modes; and how many modes are on."""

with needed_by("the memory budget's dry run, which runs a step without memory and without computing,"):
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
    )
"""Tensors with a form and no values, and what they raise where values are needed."""

with needed_by("the memory budget's dry run and probe, which read what an operation writes from its schema,"):
    OpOverload = torch._ops.OpOverload
"""The class of what a mode gets as its operation."""

schema_of: Callable[[Any], Any] = attribute(
    torch.ops.aten.add_.Tensor, "_schema", "the memory budget's dry run and probe, to tell what an operation writes,"
)
"""An operation's arguments and results, and which of them it writes into."""

with needed_by("the memory budget, which takes batches apart, and out-of-order weight gradients"):
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
"""Containers of tensors as lists of leaves, and back."""

with needed_by("the memory budget's dry run, to see that a step reads a value (.item()),"):
    LOCAL_SCALAR_DENSE = torch.ops.aten._local_scalar_dense.default
"""The operation that hands a tensor's value to Python."""

with needed_by("backward fusion, whose used-up gradients may be zeroed and moved,"):
    FOREACH_ZERO = torch.ops.aten._foreach_zero_.default
    TO_COPY = torch.ops.aten._to_copy.default
"""The operations behind ``zero_grad(set_to_none=False)`` and behind ``to``."""
