"""Private names of autograd: its engine, the numbers of its nodes, and what nodes saved.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from retime.foundations.torch_private import PrivateNameError, attribute, needed_by, read_private

# Private names of torch's dispatcher: modes below autograd, fake tensors, operations and trees of tensors.
#
# All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).

with needed_by("the memory budget, whose dry run and probe see a step operation by operation,"):
    from torch.utils._python_dispatch import TorchDispatchMode
"""A context whose ``__torch_dispatch__`` gets every operation below autograd."""

with needed_by("the memory budget, which copies real tensors in the midst of a dry run,"):
    from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

    dispatch_mode_count = torch._C._len_torch_dispatch_stack
"""A context in which operations go past all modes; and how many modes are on."""

with needed_by("CUDA graphs of two streams, which no mode sees the functions of,"):
    function_mode_count = torch._C._len_torch_function_stack
"""How many modes are on that see functions of torch, above autograd."""

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


# Private names of ``torch.compile``.
#
# All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).

_UNCOMPILED = "the memory budget, which runs compiled code uncompiled where a step is split or offloaded,"
with needed_by(_UNCOMPILED):
    from torch._dynamo import eval_frame as _eval_frame

    _eval_frame._callback_from_stance, _eval_frame.cached_backends  # noqa: B018

_PENDING = "forward fusion, whose updates cannot wait in compiled code,"
with needed_by(_PENDING):
    from torch._dynamo.callback import callback_handler as compilation_callbacks

    _OptimizedModule = torch._dynamo.OptimizedModule
"""Where functions are registered that are called when something is about to be compiled."""

compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = attribute(
    nn.Module(), "_compiled_call_impl", _PENDING
)
"""What ``module.compile()`` made, if it was called."""

_MARKS = ("_torchdynamo_orig_callable", "_compiler_ctx")
"""Attributes of a callable that ``torch.compile`` made, and of a LightningModule that Lightning compiled."""


def has_compile_mark(module: nn.Module) -> bool:
    """Return whether the module is compiled, in itself or wrapped, or is one that Lightning compiled."""
    return (
        compiled_call(module) is not None
        or isinstance(module, _OptimizedModule)
        or any(getattr(module, mark, None) is not None for mark in _MARKS)
    )


def compiled_backends() -> dict[int, Any]:
    """The backends that ``torch.compile`` was asked for so far, by number; None: ``torch.compiler.disable``'s."""
    return _eval_frame.cached_backends


@contextmanager
def stance_callback_replaced(replacement: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Iterator[None]:
    """Replace the function that says, whenever compiled code is met, what runs in its place.

    Args:
        replacement: makes the new function from torch's own, which takes and returns what compiles a frame
            (None, False: ``torch.compiler.disable``'s).
    """
    chosen = _eval_frame._callback_from_stance
    _eval_frame._callback_from_stance = replacement(chosen)  # type: ignore[assignment]
    try:
        yield
    finally:
        _eval_frame._callback_from_stance = chosen


with needed_by("offloading and out-of-order weight gradients, to tell a forward pass inside of a backward pass,"):
    graph_task_id = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread; -1 outside of any."""

with needed_by("out-of-order weight gradients, to let a graph live that is asked to (retain_graph=True),"):
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward pass leaves the graph as it is."""

with needed_by("out-of-order weight gradients, to leave alone backward passes that want none (autograd.grad),"):
    will_execute = torch._C._will_engine_execute_node
"""Whether the running backward pass reaches a node; to be called inside of one."""

with needed_by("fusion, out-of-order data parallel and offloading, which act at the end of a backward pass,"):
    queue_callback: Callable[[Callable[[], Any]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Call this at the end of the running backward pass; callbacks that callbacks queue come after all others."""

with needed_by("the dry run of a memory budget, to name the layer that a step of the backward pass belongs to,"):
    current_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""The node that the engine runs at the moment; None outside of a backward pass."""

with needed_by("out-of-order weight gradients and offloading, which find a layer's nodes by their numbers,"):
    next_sequence_number = torch._C._autograd._get_sequence_nr
    torch.autograd.graph.Node._sequence_nr  # noqa: B018
"""The number that this thread's next node of the graph gets."""

sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""The number of a node of the graph; those of leaves are larger than any other."""


def reduction_of(node: Node) -> int | None:
    """Reduction of a node that is a loss of torch: 1 for a mean, 2 for a sum; None for other nodes."""
    return getattr(node, "_saved_reduction", None)


with needed_by("offloading and out-of-order weight gradients, which must not nest in a user's own saved-tensor hooks,"):
    top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost pair of saved-tensor hooks or None; its argument says to look past those of a trace."""

with needed_by("out-of-order weight gradients, which leave torch.func's transforms alone,"):
    in_function_transform = torch._C._are_functorch_transforms_active
"""Whether code runs inside ``torch.func.grad``, ``vmap`` and their like."""

with needed_by("out-of-order weight gradients, which leave forward-mode differentiation alone,"):
    forward_ad._current_level  # noqa: B018
forward_ad_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")
"""How many levels of forward-mode differentiation are open, less one."""

with needed_by("the memory budget's probe, whose modes stay on in the backward pass,"):
    from torch.autograd.graph import _engine_run_backward as run_backward
"""``loss.backward()`` or ``autograd.grad`` without what the public functions do for TorchFunctionModes."""

RAW_SAVED = "_raw_saved_"
"""How a node's attributes begin that hold a saved tensor without unpacking it (which would call hooks)."""
_REDUCTION, _IGNORED, _CLASS_WEIGHT = "_saved_reduction", "_saved_ignore_index", RAW_SAVED + "weight"


def saves_any(node: Node, names: tuple[str, ...]) -> bool:
    """Return whether a node saved a tensor under one of these names, such as ``result``."""
    return any(hasattr(node, RAW_SAVED + name) for name in names)


def loss_choices(node: Node) -> tuple[Any, Any, bool]:
    """Reduction of a loss's node, the class that it ignores and whether it weighs classes; None where it has none."""
    weight = getattr(node, _CLASS_WEIGHT, None)
    return getattr(node, _REDUCTION, None), getattr(node, _IGNORED, None), getattr(weight, "data", None) is not None


@functools.cache
def check_saved_values() -> None:
    """Look once whether nodes have what :func:`saves_any` and :func:`loss_choices` would not miss.

    Raises:
        PrivateNameError: they keep what they saved by other names.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, 2, device="cpu", requires_grad=True)
        loss = F.nll_loss(x, torch.zeros(1, dtype=torch.int64, device="cpu"), torch.ones(2, device="cpu"))
        one_kernel, loss_node = x.exp().grad_fn, loss.grad_fn
    feature = "the memory budget, to see that a step takes another way through its losses,"
    for name in (_REDUCTION, _IGNORED, _CLASS_WEIGHT):
        read_private(loss_node, name, feature)
    if loss_choices(loss_node)[2] is not True:  # type: ignore[arg-type]
        raise PrivateNameError("a node's saved tensor no longer has 'data'", feature)
    read_private(
        one_kernel, RAW_SAVED + "result", "out-of-order weight gradients, to see that a kernel saved its output,"
    )
