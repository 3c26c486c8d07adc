"""Layers whose output gradient and weight gradient are kernels of their own: linear layers and convolutions.

Autograd runs a node's kernels on the stream of its forward pass, so the two are not left to it: each such layer becomes
one ``torch.autograd.Function``, whose backward pass computes the output gradient, and hands the weight gradient on.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from retime.foundations.lazy_updates import apply_pending, is_compiled
from retime.foundations.torch_private.engine import (
    forward_ad_level,
    graph_task_id,
    in_function_transform,
    top_saved_tensors_hooks,
    will_execute,
)
from retime.foundations.torch_private.nn_and_optim import backward_hooks, global_backward_hooks, own_parameters
from retime.foundations.torch_private.tensors import base_of, post_accumulate_hooks, tensor_hooks, unsafe_view
from retime.mechanisms.two_streams.sub_stream import SubStreamFusion

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NODES_OF_A_LAYER = 32
"""At most, of autograd's, between a layer's output and the casts of its parameters, those of its input beside them."""
_JIT: Any = torch.jit  # of which some has no types
KIND = "it is no torch.nn.Linear, Conv1d, Conv2d or Conv3d, or a subclass with code of its own"
PADDING = "its padding is more than a number of zeros on both sides"
TIED = "its parameters are tied to another module's"
COMPUTED = "its weight is computed from other parameters"
COMPILED = "it is compiled or scripted"
REPLACED = "its forward or _conv_forward method was replaced"
SEVERAL_USES = "its parameters get gradients from several places, which would add up in another order"
GRAPH = "its gradients were differentiated themselves (create_graph=True), which uses its parameters in several places"
ANOMALY = "anomaly detection looks at each gradient, on the calling thread"
HOOKS = "its parameters have hooks, which run after their gradient"
BACKWARD_HOOKS = "it, or a module around it, has backward hooks, which may read its gradients"
NOT_SPLIT = (
    "it is not called in training, or under activation checkpointing, torch.compile or function transforms, or with "
    "inputs that are no plain tensors"
)


class Kernels(Protocol):
    """Computations of one kind of layer.

    Attributes:
        arguments: of the layer, beside tensors: those of its forward pass hold for its backward pass too.
    """

    arguments: tuple[Any, ...]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""

    def output_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return dL/dx."""

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dL/dweight and dL/dbias, None where they are not needed."""

    def both(self, gradient: Tensor, x: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool) -> Any:
        """Compute what the other two do, in the calls that torch's own node makes."""


class LinearKernels:
    """``torch.nn.Linear`` on ``(N, in)``."""

    arguments = ()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def output_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return gradient.t() @ x if needs_weight else None, gradient.sum(0) if needs_bias else None

    def both(self, gradient: Tensor, x: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool) -> Any:
        output = self.output_gradient(gradient, x, weight)
        return output, self.weight_gradients(gradient, x, weight, needs_weight, needs_bias)


class ConvolutionKernels:
    """``torch.nn.Conv1d`` to ``Conv3d`` with zeros around the input.

    Args:
        arguments: of :func:`_arguments_of`.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution(x, weight, bias, *self.arguments)  # type: ignore[no-any-return]

    def _backward(self, gradient: Tensor, x: Tensor, weight: Tensor, *mask: bool) -> Any:
        sizes = [weight.shape[0]] if mask[2] else None
        return torch.ops.aten.convolution_backward(gradient, x, weight, sizes, *self.arguments, mask)

    def output_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        input_gradient: Tensor = self._backward(gradient, x, weight, True, False, False)[0]
        return input_gradient

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        _, of_weight, of_bias = self._backward(gradient, x, weight, False, needs_weight, needs_bias)
        return of_weight, of_bias

    def both(self, gradient: Tensor, x: Tensor, weight: Tensor, needs_weight: bool, needs_bias: bool) -> Any:
        return self._backward(gradient, x, weight, True, needs_weight, needs_bias)


def _arguments_of(module: Any) -> tuple[Any, ...]:
    """Return what a layer's kernels are given beside tensors, which code may set from call to call."""
    if type(module) is nn.Linear:
        return ()
    return module.stride, module.padding, module.dilation, False, (0,) * len(module.stride), module.groups


def _kernels_of(module: Any) -> Kernels:
    return LinearKernels() if type(module) is nn.Linear else ConvolutionKernels(_arguments_of(module))


@cache
def _adds_bias_at_once(dimensions: int, is_contiguous: bool) -> bool:
    """Return whether one kernel multiplies and adds the bias in ``linear``, for inputs of so many dimensions."""
    x = torch.zeros((2,) * dimensions)
    y = torch.nn.functional.linear(x if is_contiguous else x.transpose(0, 1), torch.zeros(2, 2), torch.zeros(2))
    return base_of(y) is not None


def called_module(forward: object) -> nn.Module | None:
    """The module whose call runs this object, its ``forward`` attribute; asked inside of the object's ``__call__``.

    A shallow copy of a module has the same attribute; torch calls it without saying whose it is.

    Returns:
        The module, the ``self`` of the frame that calls; None: the object is called by itself.
    """
    owner = sys._getframe(2).f_locals.get("self")
    return owner if isinstance(owner, nn.Module) and vars(owner).get("forward") is forward else None


class SplitLayer:
    """A layer's ``forward``, in place of its class's own while its weight gradients can run elsewhere.

    A copy or a pickle of the layer has a ``forward`` that runs the class's own.

    Args:
        around: it and the modules that it is inside of.
        take: called in the backward pass with each weight gradient that can run elsewhere; None: a copy's.
    """

    def __init__(self, name: str, module: Any, around: list[nn.Module], take: Take | None) -> None:
        self.name = name
        self.module = module
        self._around = around
        self.kernels: Kernels = LinearKernels() if take is None else _kernels_of(module)
        self.take = take
        self.why_in_order: str | None = None
        """Why its weight gradient stays in the conventional order; None: it can run elsewhere."""
        self.is_new = True
        """Whether its first weight gradient, which stays in order, is still to come."""
        self._looks: list[RemovableHandle] = []
        self.is_on = True
        self.output_first = False
        """Whether the weight gradient is handed on behind the output gradient, which reads the weight."""
        self._open_calls = 0
        """Forward passes since the last update whose backward pass has not come."""
        self._several_calls_in = -1
        self.on_call: Callable[[SplitLayer], None] = lambda layer: None
        """Called before each forward pass of the layer that a backward pass may follow."""
        self.anchor = torch.empty(0, requires_grad=True)
        """Runs in a backward pass through everything, and not in one for chosen inputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        owner = called_module(self)
        if owner is not None and owner is not module:  # a copy that shares attributes, as meta-learning makes them
            return type(owner).forward(owner, *args, **kwargs)
        if self.take is not None and torch.is_grad_enabled() and graph_task_id() == -1:
            self.on_call(self)
            apply_pending(p for p in (module.weight, module.bias) if p is not None)  # updates of forward fusion
        if self._can_split(args, kwargs):
            x, weight, bias = args[0], module.weight, module.bias
            if torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
                if x.dtype is torch.float64:
                    return type(module).forward(module, x)
                if self.is_new and torch.is_autocast_cache_enabled() and weight.dtype is not dtype:
                    return self._watch_casts(type(module).forward(module, x))
                x = x.to(dtype)
            elif x.dtype is not weight.dtype:
                return type(module).forward(module, x)
            if self.kernels.arguments != _arguments_of(module):
                self.kernels = _kernels_of(module)
            flat = x.dim() == 2 or type(module) is not nn.Linear
            return self._split(x, weight, bias) if flat else self._flattened(x, weight, bias)
        return type(module).forward(module, *args, **kwargs)

    def _can_split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.take is None or not self.is_on or self.why_in_order is not None or kwargs or len(args) != 1:
            return False
        x, module = args[0], self.module
        return (
            torch.is_grad_enabled()
            and type(x) is Tensor
            and x.layout is module.weight.layout is torch.strided
            and not (x.is_complex() or module.weight.is_complex())
            and _is_plain(module)
            and x.dim() == self._dimensions(x)
            and x.numel() > 0
            and not (x.is_leaf and x.requires_grad and torch.is_autocast_enabled(x.device.type))  # whose cast is shared
            and module.weight.requires_grad
            and type(module.weight) is nn.Parameter
            and (module.bias is None or type(module.bias) is nn.Parameter)
            and graph_task_id() == -1
            and not in_function_transform()
            and forward_ad_level() < 0
            and top_saved_tensors_hooks(True) is None
            and not _JIT.is_tracing()
        )

    def _dimensions(self, x: Tensor) -> int:
        """Return how many dimensions ``x`` may have: a convolution takes one picture without a batch too."""
        return max(2, x.dim()) if type(self.module) is nn.Linear else len(self.module.stride) + 2

    def _split(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _Split.apply(x, weight, bias, self.anchor, self)  # type: ignore[no-untyped-call]
        return y

    def _flattened(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run a linear layer on ``(B, ..., in)`` through the nodes that torch's own has, around one on ``(N, in)``.

        So what writes into the output, and gradients of gradients, meet what they meet there.
        """
        shape, rows = (*x.shape[:-1], weight.shape[0]), x.reshape(-1, x.shape[-1])
        if bias is not None and _adds_bias_at_once(x.dim(), x.is_contiguous()):
            return self._split(rows, weight, bias).view(shape)
        y = unsafe_view(self._split(rows, weight, None), shape)
        return y if bias is None else y + bias.to(y.dtype)

    def _watch_casts(self, y: Tensor) -> Tensor:
        """In the first step under autocast, see whether other uses share the cast of a parameter.

        Autocast casts a parameter once a forward pass: gradients of all its uses add up in the lower precision. So this
        step runs on torch's own nodes.
        """
        parameters: Parameters = self.module.weight, self.module.bias
        for parameter in parameters:
            cast, user = (None, None) if parameter is None else _cast_of(parameter, y.grad_fn)
            if parameter is not None and cast is not None and user is not None:
                self._compare_casts(parameters, parameter, cast, user)
        return y

    def _compare_casts(self, parameters: Parameters, parameter: Tensor, cast: Node, user: Node) -> None:
        mine: list[Tensor | None] = []
        """Held: autograd would otherwise add another use's gradient to it in place."""

        def note(inputs: tuple[Tensor | None, ...], _: Any) -> None:
            places = [node for node, _ in user.next_functions]
            mine[:] = [inputs[places.index(cast)]]

        def compare(totals: tuple[Tensor | None, ...]) -> None:
            if (
                mine
                and self.is_new
                and (mine[0] is None or totals[0] is None or mine[0].data_ptr() != totals[0].data_ptr())
            ):
                self.why_in_order = SEVERAL_USES

        def compare_outside(totals: tuple[Tensor | None, ...], _: Any) -> None:
            if mine and self.is_new and totals[0] is not None and self.hooks(parameters) is None:
                self._compare(parameter, totals[0])
            mine.clear()

        user.register_hook(note)
        cast.register_prehook(compare)
        cast.register_hook(compare_outside)

    def begin_call(self) -> None:
        """A forward pass keeps the weight for its backward pass."""
        self._open_calls += 1

    def end_call(self) -> None:
        """The backward pass of a forward pass has come."""
        if self._open_calls > 1:
            self._several_calls_in = graph_task_id()
        self._open_calls = max(0, self._open_calls - 1)

    def forget_calls(self) -> None:
        """Nothing keeps a weight any more: it is updated, or its step has failed."""
        self._open_calls = 0

    def has_one_call(self) -> bool:
        """Return whether no other call of the layer is, or was, in this backward pass, or waits for another."""
        return self._several_calls_in != graph_task_id()

    def hooks(self, parameters: Parameters) -> str | None:
        """Return which hooks wait for the gradients of the layer's parameters, as a reason; None: no hooks do."""
        if torch.is_anomaly_enabled():
            return ANOMALY
        if self._looks:
            return None
        if any(p is not None and (tensor_hooks(p) or _has_others_hooks(p)) for p in parameters):
            return HOOKS
        if any(global_backward_hooks()) or any(any(backward_hooks(one)) for one in self._around):
            return BACKWARD_HOOKS
        return None

    def look_for_other_uses(self, parameters: Parameters, gradients: tuple[Tensor | None, Tensor | None]) -> None:
        """In the first backward pass, see what autograd adds to these gradients before a parameter gets them."""
        self.look_no_more()  # of a backward pass that failed
        for parameter, mine in zip(parameters, gradients, strict=True):
            if parameter is not None and mine is not None:
                self._compare(parameter, mine)

    def look_no_more(self) -> None:
        """Take away what looks for other uses."""
        while self._looks:
            self._looks.pop().remove()

    def _compare(self, parameter: Tensor, mine: Tensor) -> None:
        def compare(total: Tensor) -> None:
            handle.remove()
            self._looks.remove(handle)
            self.is_new = False
            if total.data_ptr() != mine.data_ptr():
                self.why_in_order = SEVERAL_USES

        handle = parameter.register_hook(compare)  # type: ignore[no-untyped-call]
        self._looks.append(handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitLayer:
        return SplitLayer(self.name, memo.get(id(self.module), self.module), [], None)

    def __reduce__(self) -> Any:
        return SplitLayer, (self.name, self.module, [], None)


def _cast_of(parameter: Tensor, node: Node | None) -> tuple[Node | None, Node | None]:
    """Return the node that casts a parameter for autocast, and the one below ``node`` that uses the cast."""
    waiting = deque([] if node is None else [node])
    for _ in range(NODES_OF_A_LAYER):
        if not waiting:
            break
        user = waiting.popleft()
        for other, _ in user.next_functions:
            if other is None:
                continue
            if any(getattr(one, "variable", None) is parameter for one, _ in other.next_functions):
                return other, user
            waiting.append(other)
    return None, None


def _has_others_hooks(parameter: Tensor) -> bool:
    """Return whether somebody waits for a gradient to be added up who is not told by two streams."""
    hooks = (post_accumulate_hooks(parameter) or {}).values()
    owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks)
    return not all(isinstance(owner, SubStreamFusion) for owner in owners)


Parameters = tuple[nn.Parameter | None, nn.Parameter | None]
"""Weight and bias that a layer had in its forward pass, which ``torch.func.functional_call`` may have lent it; None for
what gets no gradient."""

Take = Callable[[SplitLayer, Parameters, Callable[[], tuple[Tensor | None, Tensor | None]], int], bool]
"""Given a layer, its parameters, what computes their gradients and the bytes this holds: whether they are taken."""


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, layer: SplitLayer) -> Tensor:
        ctx.layer, ctx.kernels, ctx.dtype, ctx.parameters = layer, layer.kernels, weight.dtype, (weight, bias)
        ctx.set_materialize_grads(False)
        layer.begin_call()
        if x.dtype is not weight.dtype:  # under autocast
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        # without a gradient of x, code may write into a linear layer's weight in between
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] or layer.kernels.arguments else None)
        return layer.kernels.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: SplitLayer = ctx.layer
        kernels: Kernels = ctx.kernels
        dtype = ctx.dtype
        if gradient is None:
            layer.end_call()
            return (None,) * 5
        if torch.is_grad_enabled():
            layer.why_in_order = layer.why_in_order or GRAPH
            return *_differentiable(kernels, gradient, (x, *ctx.parameters), ctx.needs_input_grad), None, None
        needs_x, *needed = ctx.needs_input_grad[:3]
        needs_weight, needs_bias = (  # frozen since the forward pass, they get none
            needs and parameter.requires_grad for needs, parameter in zip(needed, ctx.parameters, strict=True)
        )

        def weight_gradients() -> tuple[Tensor | None, Tensor | None]:
            both = kernels.weight_gradients(gradient, x, weight, needs_weight, needs_bias)
            return tuple(one if one is None else one.to(dtype) for one in both)  # type: ignore[return-value]

        of_x = of_weight = of_bias = None
        layer.end_call()
        if needs_x and layer.output_first:
            of_x = kernels.output_gradient(gradient, x, weight)
        if needs_weight or needs_bias:
            # another order for chosen inputs would not be the plain one
            can_wait = will_execute(get_gradient_edge(layer.anchor).node)
            needed = zip(ctx.parameters, (needs_weight, needs_bias), strict=True)
            parameters: Any = tuple(parameter if needs else None for parameter, needs in needed)
            take, held_bytes = layer.take, gradient.nbytes + x.nbytes
            can_go = can_wait and not _would_cast(x)
            if not (can_go and take is not None and take(layer, parameters, weight_gradients, held_bytes)):
                of_weight, of_bias = weight_gradients()
            if can_wait and layer.is_new and layer.hooks(parameters) is None:
                layer.look_for_other_uses(parameters, (of_weight, of_bias))
        if needs_x and of_x is None:
            of_x = kernels.output_gradient(gradient, x, weight)
        return of_x, of_weight, of_bias, None, None


def _differentiable(
    kernels: Kernels, gradient: Tensor, inputs: tuple[Tensor | None, ...], needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Return all three gradients for a backward pass that gets a graph itself, as under ``create_graph=True``.

    Torch's own nodes compute them, from the forward pass once more: in a graph of other nodes gradients of gradients
    would add up in another order. Hooks on the inputs see views of them, and so do not run here.
    """
    x, *parameters = (one if one is None else one.view_as(one) for one in inputs)
    assert x is not None
    weight, bias = (one if one is None else one.to(x.dtype) for one in parameters)
    assert weight is not None
    wanted = [one for one, needs in zip((x, *parameters), needed, strict=False) if needs and one is not None]
    y = kernels.forward(x, weight, bias)
    gradients = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return [next(gradients) if needs else None for needs in needed[:3]]


def split_layers(model: nn.Module, take: Take) -> tuple[list[SplitLayer], Counter[str]]:
    """Find the layers of a model whose weight gradients can run elsewhere.

    Returns:
        Those, not yet put in, and how many other modules with trainable parameters there are, by reason.
    """
    owners: Counter[Tensor] = Counter()
    compiled: set[nn.Module] = set()
    for module in model.modules():
        owners.update(module.parameters(recurse=False))
        if is_compiled(module):
            compiled.update(module.modules())
    layers: list[SplitLayer] = []
    others: Counter[str] = Counter()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        own = [p for p in own_parameters(module).values() if p is not None]
        reason = _why_whole(module, own, owners, compiled)
        if reason is None:  # a frozen one too, as it may thaw
            names = name.split(".") if name else []
            around = [modules[".".join(names[:count])] for count in range(len(names) + 1)]
            layers.append(SplitLayer(name, module, around, take))
        elif any(p.requires_grad for p in own):
            others[reason] += 1
    return layers, others


def _why_whole(module: Any, own: list[nn.Parameter], owners: Counter[Tensor], compiled: set[nn.Module]) -> str | None:
    if module in compiled:
        return COMPILED
    if type(module) is not nn.Linear and type(module) not in CONVOLUTIONS:
        return KIND
    forward = vars(module).get("forward")
    is_copy = isinstance(forward, SplitLayer) and forward.take is None
    if (forward is not None and not is_copy) or "_conv_forward" in vars(module):
        return REPLACED
    if own_parameters(module).get("weight") is None:
        return COMPUTED
    if not _is_plain(module):
        return PADDING
    if any(owners[p] > 1 for p in own):
        return TIED
    return None


def _is_plain(module: Any) -> bool:
    """Return whether torch's own code runs on a layer as it is now, with numbers of zeros around a convolution."""
    if type(module) is nn.Linear:
        return True
    numbers = {type(module.stride), type(module.padding), type(module.dilation)}
    return "_conv_forward" not in vars(module) and module.padding_mode == "zeros" and numbers == {tuple}


def _would_cast(x: Tensor) -> bool:
    """Return whether autocast is on, in the backward pass too, and would cast this tensor: on this thread alone."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and x.dtype is not torch.get_autocast_dtype(kind)
