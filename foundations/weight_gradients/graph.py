"""What the autograd graph says about one call of a layer: can its weight gradient wait?"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from retime.foundations.torch_private import saves_any, sequence_number

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Alias",
                 "Expand", "Slice", "Select")
)  # fmt: skip
_CHEAP = _VIEWS | {f"{name}Backward0" for name in ("ToCopy", "Clone", "Add", "Sub")}
"""Nodes that may run once for the output gradient and once for the weight gradient at next to no cost."""

FOREIGN = "it reads tensors of other modules that need a gradient"
ONE_KERNEL = "one kernel computes its weight and its output gradient"
SEVERAL_KERNELS = "several kernels lie on the way to its weights, which would run twice"
SAVES_OUTPUT = "its backward pass reads its output, which the model might change in place"
USED_TWICE = "it reads an input more than once, and gradients would add up in another order"


def is_leaf(node: Node) -> bool:
    """Whether the node adds a gradient into a leaf tensor."""
    return hasattr(node, "variable")


def _leaf_of(node: Any) -> Tensor:
    leaf: Tensor = node.variable
    return leaf


@dataclass(frozen=True)
class Piece:
    """The nodes between a call's output and its inputs."""

    reason: str | None = None
    """Why the weight gradient cannot run alone; None: it can."""
    leaves: tuple[Node, ...] = ()
    """Those that add into the layer's parameters."""
    reads: tuple[bool, ...] = ()
    """For each input, whether the output depends on it."""


def look_into(output: GradientEdge, inputs: Sequence[GradientEdge], parameters: set[Tensor], since: int) -> Piece:
    """Walk the piece of graph behind one call of a layer.

    Args:
        output: the edge of its output.
        inputs: the edges of its inputs; the walk stops there.
        parameters: the layer's own.
        since: autograd's sequence number when the call began; older nodes belong to other calls.
    """
    reads = {(edge.node, edge.output_nr): 0 for edge in inputs}
    reaches: dict[Node, tuple[bool, bool]] = {edge.node: (True, False) for edge in inputs}  # an input, a parameter
    leaves: list[Node] = []
    stack: list[tuple[Node, bool]] = [(output.node, False)]
    while stack:
        node, seen = stack.pop()
        edges = [(child, number) for child, number in node.next_functions if child is not None]
        if seen:
            found = [reaches.get(child, (False, False)) for child, _ in edges]
            reaches[node] = (any(f[0] for f in found), any(f[1] for f in found))
        elif node not in reaches:
            if is_leaf(node):
                if _leaf_of(node) not in parameters:
                    return Piece(FOREIGN)
                reaches[node] = (False, True)
                leaves.append(node)
            elif sequence_number(node) < since:
                return Piece(FOREIGN)
            else:
                for edge in edges:
                    if edge in reads:
                        reads[edge] += 1
                stack.append((node, True))
                stack += [(child, False) for child, _ in edges]
    counts = [reads[edge.node, edge.output_nr] for edge in inputs]
    if any(count > 1 for count in counts):
        return Piece(USED_TWICE)
    heavy = [
        n for n, (to_input, to_parameter) in reaches.items() if to_input and to_parameter and n.name() not in _CHEAP
    ]
    if any(_is_one_kernel(node) for node in heavy):
        return Piece(ONE_KERNEL)
    if len(heavy) > 1:
        return Piece(SEVERAL_KERNELS)
    if _saves_its_output(output.node):
        return Piece(SAVES_OUTPUT)
    return Piece(None, tuple(leaves), tuple(count > 0 for count in counts))


@dataclass(frozen=True)
class Span:
    """One call of a layer in a whole graph: its nodes have the sequence numbers from ``since`` to below ``until``."""

    since: int
    until: int
    outputs: frozenset[Node]
    parameters: frozenset[Tensor]


def read_elsewhere(roots: Iterable[Tensor], spans: Iterable[Span]) -> set[Tensor]:
    """Leaf tensors that code outside of the calls reads on the way to the roots.

    All parameters of a layer count whose nodes are reached in another way than through its outputs (by a loss that it
    keeps as its attribute, say).
    """
    ordered = sorted(spans, key=lambda span: span.since)
    begins = [span.since for span in ordered]

    def span_of(node: Node) -> Span | None:
        number = sequence_number(node)
        place = bisect_right(begins, number) - 1
        return ordered[place] if place >= 0 and number < ordered[place].until else None

    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    visited: set[Node] = set()
    found: set[Tensor] = set()
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        mine = span_of(node)
        for child, _ in node.next_functions:
            if child is None:
                continue
            if is_leaf(child):
                if mine is None or _leaf_of(child) not in mine.parameters:
                    found.add(_leaf_of(child))
                continue
            theirs = span_of(child)
            if theirs is not None and theirs is not mine and child not in theirs.outputs:
                found |= theirs.parameters
            stack.append(child)
    return found


def _is_one_kernel(node: Any) -> bool:
    """A custom autograd.Function, or a recurrent kernel, computes all of its gradients whatever is asked of it."""
    name = node.name()
    return isinstance(node, BackwardCFunction) or any(word in name for word in ("Rnn", "Lstm", "Gru", "NormBackward"))


def _saves_its_output(node: Any) -> bool:
    while node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return saves_any(node, ("result", "result0", "output", "out"))
