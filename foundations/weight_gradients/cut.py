"""One call of a layer, cut out of the autograd graph so that its weight gradient can wait.

Around the call stands one node. In the backward pass it runs the call's own piece of graph for the output gradient
alone (``torch.autograd.grad`` with the inputs as targets, so no weight gradient is computed) and notes the rest: the
edges of the outputs and the gradients that arrived there. Later, entering the same piece again with the parameters as
targets computes the weight gradients alone. So each kernel runs once, the graph of the model keeps its shape whatever
connects its layers, and every hook on parameters fires.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from retime.foundations.lazy_updates import is_compiled
from retime.foundations.torch_private.engine import (
    graph_task_id,
    keeps_graph,
    saves_any,
    sequence_number,
    tree_leaves,
    tree_map,
    will_execute,
)
from retime.foundations.torch_private.nn_and_optim import backward_hooks, own_parameters
from retime.foundations.torch_private.tensors import (
    storage_address,
    tensor_hooks,
    version_of,
    without_subclass_functions,
)

# What the autograd graph says about one call of a layer: can its weight gradient wait?

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
    """Return whether the node adds a gradient into a leaf tensor."""
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
    """Accumulation nodes of the layer's parameters."""
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
            below = [reaches.get(child, (False, False)) for child, _ in edges]
            reaches[node] = (any(f[0] for f in below), any(f[1] for f in below))
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
    parameters: set[Tensor] = set()
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
                    parameters.add(_leaf_of(child))
                continue
            theirs = span_of(child)
            if theirs is not None and theirs is not mine and child not in theirs.outputs:
                parameters |= theirs.parameters
            stack.append(child)
    return parameters


def _is_one_kernel(node: Any) -> bool:
    """A custom autograd.Function, or a recurrent kernel, computes all of its gradients whatever is asked of it."""
    name = node.name()
    return isinstance(node, BackwardCFunction) or any(word in name for word in ("Rnn", "Lstm", "Gru", "NormBackward"))


def _saves_its_output(node: Any) -> bool:
    while node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return saves_any(node, ("result", "result0", "output", "out"))


# The layers whose weight gradients can wait, and the blocks that k counts.

SMALL_BYTES = 64 * 1024
"""Weight gradients up to this size are computed in order and handed on later: a pass of their own over the activations
(as for a normalisation layer) would cost more than keeping them."""
COMPILED = "it is compiled or scripted"
_LEAST_REPEATS = 3
_LEAST_SHARE = 0.5
"""A class counts as the model's repeated block if its instances hold this share of the parameters' bytes."""


@dataclass(eq=False)
class Layer:
    """A module with trainable parameters of its own; its children's parameters are part of it."""

    name: str
    module: nn.Module
    parameters: list[Tensor]
    """All of them; layers are frozen and thawed while training goes on."""
    why_in_order: str | None = None
    """Why its weight gradient stays in the conventional order; None: it can wait."""
    why_buffered: str | None = None
    """Why its weight gradient is computed in the conventional order, although it is handed on later; None: it is
    computed later."""

    def trainable(self) -> list[Tensor]:
        """Return its parameters that are not frozen now."""
        return [p for p in self.parameters if p.requires_grad]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the weight gradients."""
        return sum(p.numel() * p.element_size() for p in self.trainable())


@dataclass(eq=False)
class Block:
    """Layers that are deferred together, in forward order."""

    name: str
    layers: list[Layer] = field(default_factory=list)


def find_layers(model: nn.Module) -> list[Layer]:
    """Every layer of ``model`` in order of registration; those that can be ruled out by looking at them are marked."""
    owners: Counter[Tensor] = Counter()
    for module in model.modules():
        owners.update(p for p in module.parameters(recurse=False))
    layers: list[Layer] = []
    inside: set[nn.Module] = set()
    compiled: set[nn.Module] = set()
    for name, module in model.named_modules():
        if is_compiled(module):
            compiled.update(module.modules())
        if module in inside or not _is_layer(module):
            continue
        inside.update(module.modules())
        parameters: list[Tensor] = list(module.parameters())
        if not any(p.requires_grad for p in parameters):
            continue
        layer = Layer(name, module, parameters)
        if module in compiled:
            layer.why_in_order = COMPILED
        elif isinstance(module, nn.RNNBase):
            layer.why_in_order = "its kernel computes all gradients at once, from a list of weights of its own"
        elif any(owners[p] > 1 for p in parameters):
            layer.why_in_order = "its parameters are tied to another module's"
        elif any(any(backward_hooks(m)) for m in module.modules()):
            layer.why_in_order = "it has backward hooks"
        elif any(tensor_hooks(p) for p in parameters):
            layer.why_in_order = "its parameters have gradient hooks"
        layers.append(layer)
    return layers


def _is_layer(module: nn.Module) -> bool:
    """Parameters of a module that mostly contains others (a class token, say) do not make it one layer."""
    own = sum(p.numel() for p in module.parameters(recurse=False))
    return own > 0 and 2 * own >= sum(p.numel() for p in module.parameters())


def group_into_blocks(model: nn.Module, layers: list[Layer], names: Iterable[str] | None = None) -> list[Block]:
    """Group layers, given in forward order, into blocks: the named modules, else repeated ones, else single layers.

    Layers outside these modules are blocks of their own; a small one (a normalisation, say) joins the block before it.

    Raises:
        ValueError: a name is not a module of the model, or holds no layer.
    """
    owner = _owners(model, layers, names)
    blocks: list[Block] = []
    by_owner: dict[str, Block] = {}
    for layer in layers:
        top = owner.get(layer)
        if top is not None:
            if top not in by_owner:
                by_owner[top] = Block(top)
                blocks.append(by_owner[top])
            by_owner[top].layers.append(layer)
        elif blocks and layer.size_bytes <= SMALL_BYTES:
            blocks[-1].layers.append(layer)
        else:
            blocks.append(Block(layer.name, [layer]))
    return blocks


def _owners(model: nn.Module, layers: list[Layer], names: Iterable[str] | None) -> dict[Layer, str]:
    if names is not None:
        modules = dict(model.named_modules())
        chosen = list(names)
        for name in chosen:
            if name not in modules:
                raise ValueError(
                    f"blocks: {name!r} is not a module of the model: choose names of model.named_modules()"
                )
            if not any(_is_under(layer.name, name) for layer in layers):
                raise ValueError(f"blocks: {name!r} holds no layer with trainable parameters that the model used")
    else:
        chosen = _repeated(model, layers)
    return {layer: name for layer in layers for name in chosen if _is_under(layer.name, name)}


def _repeated(model: nn.Module, layers: list[Layer]) -> list[str]:
    """Names of the instances of the finest repeated class that holds most of the parameters."""
    total = sum(layer.size_bytes for layer in layers)
    single = {layer.name for layer in layers}
    instances: dict[type[nn.Module], list[str]] = {}
    for name, module in model.named_modules():
        if name and name not in single and not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            instances.setdefault(type(module), []).append(name)
    best: list[str] = []
    for names in instances.values():
        size_bytes = sum(layer.size_bytes for layer in layers if any(_is_under(layer.name, name) for name in names))
        if len(names) >= _LEAST_REPEATS and size_bytes >= _LEAST_SHARE * total and len(names) > len(best):
            best = names
    return best


def _is_under(layer: str, module: str) -> bool:
    return layer == module or layer.startswith(f"{module}.")


# Weight gradients that are computed in order and handed on later.
#
# While the layer runs, stand-ins take the place of its parameters: leaves that share their memory. Autograd adds the
# gradients up in the stand-ins, untouched by hooks; handing them on sends each once to its parameter, hooks and all.


class BufferedGradients:
    """Gradients of one layer's parameters in one pass, gathered in stand-ins for them until the layer's turn comes.

    Args:
        layer: whose parameters they stand for.
        on_gradient: called in the backward pass, behind each gradient that one of them gets.

    Attributes:
        arrived: gradients by stand-in, for each backward pass that was not handed on yet, by autograd's number of it.
    """

    def __init__(self, layer: Layer, on_gradient: Callable[[], None]) -> None:
        self._on_gradient = on_gradient
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Parameters and their stand-ins."""
        self._now: dict[Tensor, Tensor] = {}
        self.arrived: dict[int, dict[Tensor, Tensor]] = {}
        mine = set(layer.parameters)
        self._places = [
            (module, name, parameter)
            for module in layer.module.modules()
            for name, parameter in own_parameters(module).items()
            if parameter is not None and parameter in mine
        ]

    def put_in(self) -> None:
        """Let the layer's code find the stand-ins; a frozen parameter needs none."""
        for module, name, parameter in self._places:
            if parameter.requires_grad:
                own_parameters(module)[name] = self._of(parameter)

    def _of(self, parameter: Tensor) -> Tensor:
        tensor = self._now.get(parameter)
        if tensor is None or not tensor.is_set_to(parameter):  # somebody may have given it other memory
            tensor = self._now[parameter] = parameter.detach().requires_grad_()
            tensor.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            self._pairs.append((parameter, tensor))
        return tensor

    def _take(self, tensor: Tensor) -> None:
        gradient, tensor.grad = tensor.grad, None
        assert gradient is not None
        self.arrived.setdefault(graph_task_id(), {})[tensor] = gradient
        self._on_gradient()

    def take_out(self) -> None:
        """Give the layer its parameters back."""
        for module, name, parameter in self._places:
            if parameter in self._now and own_parameters(module).get(name) is self._now[parameter]:
                own_parameters(module)[name] = parameter

    def run_now(self) -> bool:
        """Return whether the running backward pass brings one of them a gradient."""
        return any(will_execute(get_gradient_edge(s).node) for _, s in self._pairs)

    def is_torn(self) -> bool:
        """Return whether the running backward pass brings a parameter gradients beside those of its stand-in."""
        return any(
            will_execute(get_gradient_edge(s).node) and will_execute(get_gradient_edge(p).node) for p, s in self._pairs
        )

    def hand_on(self, backward: int) -> bool:
        """Send one backward pass's gradients to the parameters; returns whether there were any."""
        arrived = self.arrived.pop(backward, {})
        pairs = [(p, arrived[s]) for p, s in self._pairs if s in arrived and p.requires_grad]
        if pairs:
            parameters: list[Any] = [parameter for parameter, _ in pairs]
            torch.autograd.backward(parameters, [gradient for _, gradient in pairs], inputs=parameters)
        return bool(pairs)

    def release(self) -> None:
        """No backward pass comes any more. The graph may live on and with it the stand-ins: no alias must be left."""
        for _, tensor in self._pairs:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._pairs.clear()
        self._now.clear()


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
    """Accumulation nodes of the parameters that it read."""
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
    aliases: dict[int, Tensor] = {}  # layers ask whether two of their arguments are the same object

    def rename(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        call.memory |= _memory([value])
        if not value.requires_grad or isinstance(value, torch.nn.Parameter):
            return value
        if id(value) in aliases:
            return aliases[id(value)]
        renamed = aliases[id(value)] = torch.ops.aten.alias.default(value) if rename_inputs else value
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
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    call.outputs = [get_gradient_edge(tensor) for tensor in outputs]
    return outputs


def why_whole(call: Call, output: Any, outputs: list[Tensor]) -> str | None:
    """Reason why the model must get this call's outputs as they are; None: a single one can be replaced."""
    if any(version_of(tensor) != version for tensor, version in zip(call.originals, call.versions, strict=True)):
        return CHANGES_INPUT
    if len(outputs) > 1:
        return SEVERAL_OUTPUTS
    others = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf is not outputs[0]]
    if _memory(outputs) & (call.memory | _memory(others) | _memory(call.layer.parameters)):
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
        """Return whether the running backward pass is for all leaves: ``grad(inputs=...)`` wants no weight gradient."""
        return bool(will_execute(self._node))

    def cut(self, call: Call, output: Any, tensor: Tensor, notify: OnOutputGradient) -> tuple[Node, Any]:
        """Replace the output by one whose gradient goes round the layer's piece of graph.

        Args:
            call: one that :func:`leave` has seen.
            output: what the layer returned.
            tensor: the only tensor in it that needs a gradient.
            notify: told of each weight gradient that waits from now on.

        Returns:
            The cut node, which lives as long as the graph and has the call as its ``call``, and the new output.
        """
        call.hidden = tensor
        replaced: Tensor = _Cut.apply(self, call, notify, self._leaf, *call.originals)  # type: ignore[no-untyped-call]
        call.originals = []
        node = replaced.grad_fn
        assert node is not None
        if isinstance(output, Tensor):
            return node, replaced
        return node, tree_map(lambda value: replaced if value is tensor else value, output)


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
