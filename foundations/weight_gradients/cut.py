"""One call of a layer, cut out of the autograd graph so that its weight gradient can wait.

Around the call stands one node. In the backward pass it runs the call's own piece of graph for the output gradient
alone (``torch.autograd.grad`` with the inputs as targets, so no weight gradient is computed) and notes the rest: the
edges of the outputs and the gradients that arrived there. Later, entering the same piece again with the parameters as
targets computes the weight gradients alone. So each kernel runs once, the graph of the model keeps its shape whatever
connects its layers, and every hook on parameters fires.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from retime.foundations.torch_private import (
    keeps_graph,
    storage_address,
    tree_leaves,
    tree_map,
    version_of,
    will_execute,
    without_subclass_functions,
)
from retime.foundations.weight_gradients.layers import Layer

CHANGES_INPUT = "it changes its input in place"
SEVERAL_OUTPUTS = "it has several outputs, of which some may get no gradient"
SHARES_MEMORY = "its output shares memory with something else, and both may be changed in place"
DOUBLE_BACKWARD = (
    "create_graph=True needs a graph of the backward pass, which out-of-order backprop takes apart: use k=0 for this "
    "model"
)


@dataclass(eq=False)
class Call:
    """One call of a layer, from its forward pre-hook to its output gradient."""

    layer: Layer
    originals: list[Tensor]
    """The inputs that need a gradient, as the model passed them."""
    inputs: list[GradientEdge]
    """The same inputs as the layer sees them."""
    since: int
    versions: list[int] = field(default_factory=list)
    memory: set[int] = field(default_factory=set)
    """The storages of all inputs."""
    outputs: list[GradientEdge] = field(default_factory=list)
    leaves: tuple[Node, ...] = ()
    """Of the parameters that it read."""
    hidden: Tensor | None = None


@dataclass(eq=False)
class WeightGradient:
    """The weight gradient of one call, which waits: its piece of graph and what arrived at the output."""

    layer: Layer
    outputs: list[GradientEdge]
    leaves: tuple[Node, ...]
    gradient: Tensor
    keep_graph: bool
    """Whether the backward pass that it belongs to keeps the graph."""


OnOutputGradient = Callable[[WeightGradient], None]


def enter(layer: Layer, since: int, args: Any, kwargs: Any, *, rename_inputs: bool) -> tuple[Call, Any, Any]:
    """Begin a call; to cut it later, its inputs get another name, behind which its piece of graph begins."""
    call = Call(layer, [], [], since)
    known: dict[int, Tensor] = {}  # layers ask whether two of their arguments are the same object

    def rename(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        call.memory |= _memory([value])
        if not value.requires_grad or isinstance(value, torch.nn.Parameter):
            return value
        if id(value) in known:
            return known[id(value)]
        renamed = known[id(value)] = torch.ops.aten.alias.default(value) if rename_inputs else value
        call.originals.append(value)
        call.inputs.append(get_gradient_edge(renamed))
        call.versions.append(version_of(value))
        return renamed

    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return call, (rename(args[0]),), kwargs
    return call, tree_map(rename, args), tree_map(rename, kwargs)


def leave(call: Call, output: Any) -> list[Tensor]:
    """The outputs of the layer that need a gradient; notes where the call's piece of graph ends."""
    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    call.outputs = [get_gradient_edge(tensor) for tensor in found]
    return found


def why_whole(call: Call, output: Any, found: list[Tensor]) -> str | None:
    """Why the model must get this call's outputs as they are; None: a single one can be replaced."""
    if any(version_of(tensor) != version for tensor, version in zip(call.originals, call.versions, strict=True)):
        return CHANGES_INPUT
    if len(found) > 1:
        return SEVERAL_OUTPUTS
    others = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf is not found[0]]
    if _memory(found) & (call.memory | _memory(others) | _memory(call.layer.parameters)):
        return SHARES_MEMORY
    return None


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    with without_subclass_functions():  # parameters may wait for updates, and this is no read of them
        return {storage_address(t.untyped_storage()) for t in tensors if t.layout is torch.strided}


class Anchor:
    """The leaf that makes the cut nodes of one model run in every backward pass that is for all leaves."""

    def __init__(self) -> None:
        self._leaf = torch.zeros((), requires_grad=True)
        self._node = get_gradient_edge(self._leaf).node

    def is_whole(self) -> bool:
        """Whether the running backward pass is for all leaves: ``grad(inputs=...)`` wants no weight gradient."""
        return bool(will_execute(self._node))

    def cut(self, call: Call, output: Any, found: Tensor, notify: OnOutputGradient) -> tuple[Node, Any]:
        """Replace the output by one whose gradient goes round the layer's piece of graph.

        Args:
            call: one that :func:`leave` has seen.
            output: what the layer returned.
            found: the only tensor in it that needs a gradient.
            notify: told of each weight gradient that waits from now on.

        Returns:
            The cut node, which lives as long as the graph and has the call as its ``call``, and the new output.
        """
        call.hidden = found
        replaced: Tensor = _Cut.apply(self, call, notify, self._leaf, *call.originals)  # type: ignore[no-untyped-call]
        call.originals = []
        node = replaced.grad_fn
        assert node is not None
        if isinstance(output, Tensor):
            return node, replaced
        return node, tree_map(lambda value: replaced if value is found else value, output)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Anchor, call: Call, notify: OnOutputGradient, leaf: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.anchor, ctx.call, ctx.notify = anchor, call, notify
        hidden, call.hidden = call.hidden, None
        assert hidden is not None
        # .data and not detach(): views made in a Function must not be changed in place, as an in-place ReLU would
        return hidden.data

    @staticmethod
    def backward(ctx: Any, arrived: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        if arrived is None:
            return (None,) * (4 + len(call.inputs))
        if torch.is_grad_enabled():
            raise RuntimeError(DOUBLE_BACKWARD)
        inputs = []
        if call.inputs:
            inputs = list(torch.autograd.grad(call.outputs, call.inputs, arrived, retain_graph=True, allow_unused=True))
        if ctx.anchor.is_whole():
            keep = bool(keeps_graph())
            waiting = WeightGradient(call.layer, call.outputs, call.leaves, arrived, keep)
            if not keep:  # the model's graph may live on; this piece goes with its weight gradient
                call.outputs, call.leaves = [], ()
            ctx.notify(waiting)
        return (None, None, None, None, *inputs)


def run_weight_gradients(waiting: list[WeightGradient]) -> bool:
    """Compute the weight gradients of calls in one backward pass; hooks on the parameters fire once.

    Returns:
        Whether there was one: parameters may have been frozen since the forward pass.
    """
    wanted = trained(waiting)
    if wanted:
        edges = [edge for one in waiting for edge in one.outputs]
        gradients: list[Any] = [one.gradient for one in waiting]
        torch.autograd.backward(edges, gradients, retain_graph=waiting[0].keep_graph, inputs=wanted)
    return bool(wanted)


def trained(waiting: list[WeightGradient]) -> list[Tensor]:
    """The parameters that these gradients are for, but for those that have been frozen since."""
    leaves: Any = {leaf: None for one in waiting for leaf in one.leaves}
    return [leaf.variable for leaf in leaves if leaf.variable.requires_grad]
