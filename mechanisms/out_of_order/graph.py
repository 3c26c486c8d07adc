"""What the autograd graph says about one call of a layer: can its weight gradient wait?"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

_CHEAP = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Alias",
                 "ToCopy", "Expand", "Slice", "Select", "Clone", "Add", "Sub")
)  # fmt: skip
"""Nodes that may run once for the output gradient and once for the weight gradient at next to no cost."""

FOREIGN = "it reads tensors of other modules that need a gradient"
ONE_KERNEL = "one kernel computes its weight and its output gradient"
SEVERAL_KERNELS = "several kernels lie on the way to its weights, which would run twice"
USED_TWICE = "it reads an input more than once, and gradients would add up in another order"


def is_leaf(node: Node) -> bool:
    """Whether the node adds a gradient into a leaf tensor."""
    return hasattr(node, "variable")


def _leaf_of(node: Any) -> Tensor:
    leaf: Tensor = node.variable
    return leaf


def why_inseparable(
    outputs: Iterable[GradientEdge], inputs: Iterable[GradientEdge], parameters: set[Tensor], since: int
) -> str | None:
    """Walk the nodes between a call's outputs and its inputs; the reason why its weight gradient cannot run alone.

    :param outputs: edges of the call's outputs.
    :param inputs: edges of its inputs; the walk stops there.
    :param parameters: the layer's own trainable parameters.
    :param since: autograd's sequence number when the call began; older nodes belong to other calls.
    """
    reads = {(edge.node, edge.output_nr): 0 for edge in inputs}
    reaches: dict[Node, tuple[bool, bool]] = {edge.node: (True, False) for edge in inputs}  # an input, a parameter
    stack: list[tuple[Node, bool]] = [(edge.node, False) for edge in outputs]
    while stack:
        node, seen = stack.pop()
        edges = [(child, number) for child, number in node.next_functions if child is not None]
        if seen:
            found = [reaches.get(child, (False, False)) for child, _ in edges]
            reaches[node] = (any(f[0] for f in found), any(f[1] for f in found))
        elif node not in reaches:
            if is_leaf(node):
                if _leaf_of(node) not in parameters:
                    return FOREIGN
                reaches[node] = (False, True)
            elif node._sequence_nr() < since:
                return FOREIGN
            else:
                for edge in edges:
                    if edge in reads:
                        reads[edge] += 1
                stack.append((node, True))
                stack += [(child, False) for child, _ in edges]
    if any(count > 1 for count in reads.values()):
        return USED_TWICE
    heavy = [
        n for n, (to_input, to_parameter) in reaches.items() if to_input and to_parameter and n.name() not in _CHEAP
    ]
    if any(_is_one_kernel(node) for node in heavy):
        return ONE_KERNEL
    return SEVERAL_KERNELS if len(heavy) > 1 else None


def leaves_outside(roots: Iterable[Tensor], calls: dict[Node, list[Node]]) -> set[Tensor]:
    """Leaf tensors that the roots reach without passing through the calls.

    :param calls: by node of a call's output, the nodes of its inputs, where the walk goes on.
    """
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    visited: set[Node] = set()
    found: set[Tensor] = set()
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        if is_leaf(node):
            found.add(_leaf_of(node))
        elif node in calls:
            stack += calls[node]
        else:
            stack += [child for child, _ in node.next_functions if child is not None]
    return found


def sequence_number() -> int:
    """The number that the next node of this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


def _is_one_kernel(node: Any) -> bool:
    """A custom autograd.Function, or a recurrent kernel, computes all of its gradients whatever is asked of it."""
    name = node.name()
    return isinstance(node, BackwardCFunction) or any(word in name for word in ("Rnn", "Lstm", "Gru", "NormBackward"))
