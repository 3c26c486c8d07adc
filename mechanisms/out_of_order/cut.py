"""One call of a layer, cut out of the autograd graph so that its weight gradient can wait.

Around the call stands one node. In the backward pass it runs the call's own piece of graph for the output gradient
alone (``torch.autograd.grad`` with the inputs as targets, so no weight gradient is computed) and notes the rest: the
edges of the outputs and the gradients that arrived there. Later, entering the same piece again with the parameters as
targets computes the weight gradients alone. So each kernel runs once, the graph of the model keeps its shape whatever
connects its layers, and every hook on parameters fires.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from retime.mechanisms.out_of_order.layers import Layer

DOUBLE_BACKWARD = (
    "create_graph=True needs a graph of the backward pass, which out-of-order backprop takes apart: use k=0 for this "
    "model"
)


@dataclass(eq=False)
class Call:
    """One call of a layer, from its forward pre-hook to its weight gradient."""

    layer: Layer
    originals: list[Tensor]
    """The inputs that need a gradient, as the model passed them."""
    inputs: list[GradientEdge]
    """The same inputs as the layer sees them."""
    since: int
    versions: list[int] = field(default_factory=list)
    outputs: list[GradientEdge] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    """What arrived at the outputs, once the output gradient is done."""
    keep_graph: bool = False


def enter(layer: Layer, since: int, args: Any, kwargs: Any, *, rename_inputs: bool) -> tuple[Call, Any, Any]:
    """Begin a call; to cut it later, its inputs get another name, behind which its piece of graph begins."""
    call = Call(layer, [], [], since)
    known: dict[int, Tensor] = {}  # layers ask whether two of their arguments are the same object

    def rename(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad) or isinstance(value, torch.nn.Parameter):
            return value
        if id(value) in known:
            return known[id(value)]
        renamed = known[id(value)] = torch.ops.aten.alias.default(value) if rename_inputs else value
        call.originals.append(value)
        call.inputs.append(get_gradient_edge(renamed))
        call.versions.append(value._version)
        return renamed

    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return call, (rename(args[0]),), kwargs
    return call, pytree.tree_map(rename, args), pytree.tree_map(rename, kwargs)


def leave(call: Call, output: Any) -> list[Tensor]:
    """The outputs of the layer that need a gradient; notes where the call's piece of graph ends."""
    leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    call.outputs = [get_gradient_edge(tensor) for tensor in found]
    return found


def changed_its_input(call: Call) -> bool:
    """Whether the layer wrote into one of its inputs."""
    return any(tensor._version != version for tensor, version in zip(call.originals, call.versions, strict=True))


class Backward:
    """What the cut nodes of one model share: the anchor that makes them run, and who takes note of them."""

    def __init__(self, on_output_gradient: Callable[[Call], None]) -> None:
        self.on_output_gradient = on_output_gradient
        self.anchor = torch.zeros((), requires_grad=True)
        self.anchor_node = get_gradient_edge(self.anchor).node

    def is_whole(self) -> bool:
        """Whether the running backward pass is for all leaves: ``grad(inputs=...)`` wants no weight gradient."""
        return bool(torch._C._will_engine_execute_node(self.anchor_node))

    def cut(self, call: Call, output: Any, found: list[Tensor]) -> Any:
        """Replace the outputs by ones whose gradient goes round the layer's piece of graph."""
        call.hidden = found
        replaced = _Cut.apply(self, call, self.anchor, *call.originals)  # type: ignore[no-untyped-call]
        call.originals = []
        if isinstance(output, Tensor):
            return replaced[0]
        by_id = {id(old): new for old, new in zip(found, replaced, strict=True)}
        return pytree.tree_map(lambda value: by_id.get(id(value), value), output)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, call: Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shared, ctx.call = backward, call
        # .data and not detach(): views made in a Function must not be changed in place, as an in-place ReLU would
        outputs = tuple(tensor.data for tensor in call.hidden)
        call.hidden = []
        return outputs

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(DOUBLE_BACKWARD)
        call: Call = ctx.call
        present = [(edge, g) for edge, g in zip(call.outputs, arrived, strict=True) if g is not None]
        if not present:
            return (None,) * (3 + len(call.inputs))
        edges, gradients = [edge for edge, _ in present], [gradient for _, gradient in present]
        if not ctx.shared.is_whole():
            return (None, None, None, *_gradients(edges, gradients, call.inputs, keep=True))
        keep = bool(torch._C._autograd._get_current_graph_task_keep_graph())
        work = Call(call.layer, [], call.inputs, call.since, outputs=edges, keep_graph=keep)
        inputs = _gradients(edges, gradients, call.inputs, keep=True)
        work.gradients = gradients
        if not keep:
            call.outputs = []  # the model's graph may live on; this piece goes with its weight gradient
        ctx.shared.on_output_gradient(work)
        return (None, None, None, *inputs)


def _gradients(edges: Any, gradients: Any, targets: Any, *, keep: bool) -> Any:
    if not targets:
        return []
    return list(torch.autograd.grad(edges, targets, gradients, retain_graph=keep, allow_unused=True))


def run_weight_gradient(calls: list[Call]) -> None:
    """Compute the weight gradients of one layer's calls; hooks on its parameters fire once."""
    edges = [edge for call in calls for edge in call.outputs]
    gradients = [gradient for call in calls for gradient in call.gradients]
    torch.autograd.backward(edges, gradients, retain_graph=calls[0].keep_graph, inputs=calls[0].layer.parameters)
