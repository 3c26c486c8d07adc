"""Parts of the model as CUDA graphs: the paper's pre-compiled kernel issue (Oh et al. 2022, section 4.2).

A part is captured as two graphs, one of its forward pass and one of its backward pass with both streams inside. Each
step copies the inputs into the graph's own, replays, and copies results and gradients out, so that nothing a user holds
is written into by a later step. All else of a step stays outside and is the user's: the loss, what is logged, hooks of
parameters, a scaler, accumulation, clipping and the optimizer's update. Python code runs in a capture only, so a part
is a module whose code :class:`~retime.mechanisms.two_streams.static_code.StaticCode` has read, and a call whose state,
forms or settings are others than in the capture runs kernel by kernel.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.lazy_updates import apply_pending, is_compiled
from retime.foundations.messages import Report, each_because, warn_difference, warn_no_effect
from retime.foundations.preserve_state import random_state, set_random_state
from retime.foundations.torch_private.engine import (
    dispatch_mode_count,
    forward_ad_level,
    function_mode_count,
    graph_task_id,
    in_function_transform,
    keeps_graph,
    top_saved_tensors_hooks,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from retime.foundations.torch_private.nn_and_optim import (
    backward_hooks,
    forward_hooks,
    forward_pre_hooks,
    global_backward_hooks,
    global_forward_hooks,
)
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.two_streams.layers import COMPILED, SEVERAL_USES, SplitLayer, called_module
from retime.mechanisms.two_streams.static_code import NotStaticError, StaticCode, Watch, are_own, uses_of

LEAST_LAYERS = 2
FEW = f"they are in no module with {LEAST_LAYERS} such layers"
FIRST = "the form of its gradients is not known before the first backward pass"
FORMS = "inputs have other shapes, strides or types than before"
INPUTS = "it was given something other than tensors of its device by position"
STATE = "modules, parameters, attributes or hooks have changed"
SETTINGS = "settings of torch have changed (autocast, precision, modes)"
HOOKS = "its modules have hooks"
WATCHED = "anomaly detection, saved-tensor hooks or function transforms see each operation"
OPEN = "the backward pass of the call before it has not run yet"
USES = "it uses a parameter, or an input that needs a gradient, in several places"
CASTS = "it is under autocast, whose casts of its weights are shared with other uses of them"
OUTPUTS = "it returns something other than dense tensors of its own that need gradients"
_ALIGNED_BYTES = 512  # as the allocator does, so that kernels that look at alignment do what they do without a graph


class GraphedPart:
    """A module's ``forward``, in place of its class's own: replays CUDA graphs where this changes nothing.

    A copy or a pickle of the module has a ``forward`` that runs the class's own.

    Args:
        layers: those of its layers that may run on two streams.
        on_call: called before each forward pass that a backward pass may follow.
        counts: of weight gradients by whether they ran on the sub-stream, which replays add to.
        around: parts that it is inside of: while one of them runs, it is a piece of that one.

    Attributes:
        two_streams: whether weight gradients run on the sub-stream in a graph; None: kernels are issued one by one.
        why_not: why the part is never captured; None: it may be.
        replays: calls that replayed a graph.
        plain: calls that did not though they were to, by reason.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        layers: list[SplitLayer],
        on_call: Callable[[GraphedPart], None] | None,
        counts: Counter[bool],
        around: Sequence[GraphedPart] = (),
    ) -> None:
        self.name, self.module, self.layers = name, module, layers
        self._around = around
        self.on_call = on_call
        self.two_streams: bool | None = None
        self.why_not: str | None = None
        self.replays = 0
        self.plain = Counter[str]()
        self._counts = counts
        self._code = StaticCode(module, (SplitLayer, GraphedPart)) if on_call is not None else None
        if self._code is not None:
            self.why_not = self._code.why_not
        self._captures: dict[bool, _Capture] = {}
        self._seen: tuple[Any, ...] | None = None
        """Forms and settings of the last call that ran kernel by kernel, and a snapshot of what its code read."""
        self._gradients: dict[int, _GradientForm] = {}
        """Of that call's results, as they came in the backward pass."""
        self._stream: torch.cuda.Stream | None = None
        self.was_called = False
        self.is_running = False
        """Whether a call of it is under way, in which its layers' calls begin no step."""
        self._open: weakref.ref[_Call] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = None if torch.compiler.is_compiling() else called_module(self)
        owner = self.module if owner is None else owner  # or a copy that shares attributes
        run = partial(type(owner).forward, owner)
        if self.on_call is None or self.is_running or torch.compiler.is_compiling() or owner is not self.module:
            return run(*args, **kwargs)
        is_inside = any(part.is_running and part.why_not is None for part in self._around)
        if is_inside or not torch.is_grad_enabled() or graph_task_id() != -1:
            return run(*args, **kwargs)
        self.is_running = self.was_called = True
        try:
            self.on_call(self)
            if self.two_streams is None or self.why_not is not None:
                return run(*args, **kwargs)
            key, capture, why = self._look(args, kwargs)
            if capture is not None:
                return self._replay(capture, args)
            if why is not None:
                self._note(why)
            results = run(*args, **kwargs)
            if key is not None:
                self._see(key, results)
            return results
        finally:
            self.is_running = False

    @property
    def is_captured(self) -> bool:
        """Return whether there is a graph of it."""
        return bool(self._captures)

    def keep_only(self, two_streams: bool | None) -> None:
        """Free the graphs of the other ways to run the part; None: of all."""
        for one in [one for one in self._captures if one is not two_streams]:
            del self._captures[one]

    def _look(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...] | None, _Capture | None, str | None]:
        """Return what a capture of this call depends on, the graphs to replay, and otherwise why there are none."""
        assert self._code is not None
        device = self.layers[0].module.weight.device
        if kwargs or not args or not all(_is_plain(one, device) for one in args):
            return None, None, INPUTS
        is_watched = torch.is_anomaly_enabled() or top_saved_tensors_hooks(True) is not None
        if is_watched or in_function_transform() or forward_ad_level() >= 0:
            return None, None, WATCHED
        if any(global_backward_hooks()) or any(global_forward_hooks()):
            return None, None, HOOKS
        call = self._open() if self._open is not None else None
        is_cast = torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()
        if call is not None and not call.is_done:
            if is_cast and self.why_not is None:
                self.why_not = CASTS
                warn_difference(
                    f"graph: {self.name or 'the model'!r} runs kernel by kernel from now on: it is called several "
                    "times in a step. It was not before, so its gradients may round differently in this one"
                )
            return None, None, OPEN
        assert self.two_streams is not None
        capture = self._captures.get(self.two_streams)
        # updates of forward fusion
        apply_pending(self.module.parameters() if capture is None else capture.parameters)
        now, last_key = (tuple(map(_form_of, args)), _settings(device)), self._seen if capture is None else capture.key
        why = None
        if last_key is not None:
            if not last_key[2].holds():
                why = STATE
            elif now != last_key[:2]:
                why = FORMS if now[0] != last_key[0] else SETTINGS
            elif capture is None and not self._gradients:
                why = FIRST
        if capture is not None and why is None:
            return None, capture, None
        if any(map(_has_hooks, self.module.modules())):
            return None, None, HOOKS
        if capture is not None:
            return None, None, why
        key = *now, self._code.snapshot()
        if last_key is None or why is not None:
            return key, None, why
        if self._stream is None:
            priority = torch.cuda.current_stream(device).priority
            self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self._code = StaticCode(self.module, (SplitLayer, GraphedPart))  # modules may be others by now
        self.why_not, key = self._code.why_not, (*now, self._code.snapshot())
        before = self._counts.copy()
        try:
            if is_cast and any(layer.why_in_order == SEVERAL_USES for layer in self.layers):
                self.why_not = CASTS
            weights = [p for layer in self.layers for p in layer.module.parameters()] if is_cast else None
            self.why_not = self.why_not or _rehearse(self.module, args, self._gradients, self._stream, weights)
            if self.why_not is None and not key[2].holds():
                self.why_not = "it changes its own attributes"
            if self.why_not is not None:
                warn_no_effect(f"graph: {self.name or 'the model'!r} is not captured because {self.why_not}")
                return None, None, None
            given = self._counts - before
            capture = _Capture(self.module, args, key, self._gradients, given, self._stream)
            self._captures[self.two_streams] = capture
        finally:
            self._counts.clear()
            self._counts.update(before)
        return key, capture, None

    def _note(self, why: str) -> None:
        if self.plain[why] == (2 if why == FIRST else 0):
            warn_no_effect(f"graph: {self.name or 'the model'!r} runs kernel by kernel where {why}")
        self.plain[why] += 1

    def _see(self, key: tuple[Any, ...], results: Any) -> None:
        """Note in which form the gradients of these results come in the backward pass."""
        self._seen = key
        gradients: dict[int, _GradientForm] = {}
        self._gradients = gradients

        def note(number: int, gradient: Tensor) -> None:
            gradients[number] = _gradient_form(gradient)

        for number, one in enumerate(tree_leaves(results)):
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(partial(note, number))  # type: ignore[no-untyped-call]

    def _replay(self, capture: _Capture, args: tuple[Tensor, ...]) -> Any:
        self.replays += 1
        call = _Call(capture, self._counts, len(args))
        self._open = weakref.ref(call)
        results = _Replay.apply(call, *args, *capture.parameters)  # type: ignore[no-untyped-call]
        del call
        return tree_unflatten(results, capture.structure)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedPart:
        return GraphedPart(self.name, memo.get(id(self.module), self.module), [], None, Counter())

    def __reduce__(self) -> Any:
        return GraphedPart, (self.name, self.module, [], None, Counter())


class _Call:
    """One forward pass of a capture, and whether its backward pass is over."""

    def __init__(self, capture: _Capture, counts: Counter[bool], inputs: int) -> None:
        self.capture, self.counts, self.inputs = capture, counts, inputs
        self.versions: list[int] = []
        self.is_done = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.parameters = call, tensors[call.inputs :]
        call.versions = [version_of(parameter) for parameter in ctx.parameters]
        ctx.set_materialize_grads(False)
        return call.capture.forward(tensors[: call.inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError("graph=True: gradients of gradients (create_graph=True) need graph=False")
        if call.is_done:
            raise RuntimeError("this graph's backward pass has run: the first one needs retain_graph=True")
        if call.versions != [version_of(parameter) for parameter in ctx.parameters]:
            raise RuntimeError("graph=True: a parameter was written into between its forward and backward pass")
        call.is_done = not keeps_graph()
        return None, *call.capture.backward(gradients, call.counts)


_GradientForm = tuple[tuple[int, ...], tuple[Any, ...]]
"""Strides, and whether autocast is on behind it, of the gradient of a result."""


class _Capture:
    """The graphs of one part, run in one way, and the memory that they read and write.

    Args:
        args: in whose form inputs are.
        key: forms, settings and a snapshot that it is right for.
        gradients: in which form gradients of the results come, by number; others get none.
        given: weight gradients in one backward pass, by whether they run on the sub-stream.
        stream: to capture on, of the priority that its kernels get.

    Attributes:
        structure: of what the part returns.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Tensor, ...],
        key: tuple[Any, ...],
        gradients: dict[int, _GradientForm],
        given: Counter[bool],
        stream: torch.cuda.Stream,
    ) -> None:
        self.key, self.given, self._form = key, given, dict(gradients)
        self._inputs = [_buffer_like(x).requires_grad_(x.requires_grad) for x in args]
        self.parameters = list(module.parameters())
        self._stand_ins = _stand_ins(module)
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        how: dict[str, Any] = {"pool": torch.cuda.graph_pool_handle(), "stream": stream}
        how["capture_error_mode"] = "thread_local"  # a loader's thread may pin memory meanwhile
        try:
            with torch.cuda.graph(self._graphs[0], **how):
                results = torch.func.functional_call(module, self._stand_ins, tuple(self._inputs))
            self._results, self.structure = tree_flatten(results)
            self._result_gradients = {
                number: _buffer(self._results[number], strides) for number, (strides, _) in self._form.items()
            }
            with torch.cuda.graph(self._graphs[1], **how):
                _backward(self._results, self._result_gradients, self._form)
                self._gather()
        except Exception as error:
            error.add_note("retime: while the part was captured into a CUDA graph; graph=False trains without")
            raise

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay the forward pass, and return copies of its results."""
        self._fill(self._inputs, inputs)
        self._graphs[0].replay()
        return tuple(result.detach().clone() for result in self._results)

    def backward(self, gradients: Sequence[Tensor | None], counts: Counter[bool]) -> list[Tensor | None]:
        """Return copies of the gradients of inputs and parameters, of a replay where gradients come in their form.

        Args:
            gradients: of the results.
            counts: to add weight gradients to, by whether they ran on the sub-stream.
        """
        given = {number: one for number, one in enumerate(gradients) if one is not None}
        if {number: _gradient_form(one) for number, one in given.items()} != self._form:
            # the captured forward pass's own nodes keep what they saved: the graph's memory
            torch.autograd.backward([self._results[n] for n in given], list(given.values()), retain_graph=True)
            return [_taken(one) for one in (*self._inputs, *self._stand_ins.values())]
        self._fill(list(self._result_gradients.values()), [given[number] for number in self._result_gradients])
        self._graphs[1].replay()
        counts.update(self.given)
        of_inputs = [None if one is None else one.clone() for one in self._input_gradients]
        copies = [flat.clone() for flat in self._flats]
        return of_inputs + [
            None if place is None else copies[place[0]].as_strided(*place[1:]) for place in self._places
        ]

    def _fill(self, buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy values into the graph's memory, past the versions that the graph's own autograd nodes look at."""
        for buffer, value in zip(buffers, values, strict=True):
            _compact(buffer.data).copy_(_compact(value.detach()))

    def _gather(self) -> None:
        """Put all gradients of one type behind one another, so that one kernel copies them."""
        self._input_gradients = [_taken(one) for one in self._inputs]
        gradients = [_taken(one) for one in self._stand_ins.values()]
        self._places: list[tuple[Any, ...] | None] = []
        sizes: dict[torch.dtype, int] = {}
        for one in gradients:
            if one is None:
                self._places.append(None)
                continue
            begin = sizes.get(one.dtype, 0)
            aligned = _ALIGNED_BYTES // one.element_size()
            sizes[one.dtype] = begin + (one.numel() + aligned - 1) // aligned * aligned
            self._places.append(([*sizes].index(one.dtype), one.shape, one.stride(), begin))
        self._flats = [torch.empty(size, dtype=dtype, device=self._results[0].device) for dtype, size in sizes.items()]
        for one, place in zip(gradients, self._places, strict=True):
            if one is not None and place is not None:
                self._flats[place[0]].as_strided(*place[1:]).copy_(one)


# One run on copies, before anything is captured.


def _rehearse(
    module: nn.Module,
    args: tuple[Tensor, ...],
    gradients: dict[int, _GradientForm],
    stream: torch.cuda.Stream,
    weights: list[nn.Parameter] | None,
) -> str | None:
    """Run both passes once where they will be captured, on copies of what they write into, as a capture needs it.

    Libraries make what they need for a stream in their first calls there, which a capture does not have.

    Args:
        gradients: in which form gradients of the results come.
        stream: that the capture will be on.
        weights: that are known to have no other uses, where autocast keeps casts; None: it keeps none.

    Returns:
        Why the part cannot be captured; None: it can.
    """
    device, before = args[0].device, random_state()
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            inputs = [_buffer_like(x) for x in args]
            for buffer, x in zip(inputs, args, strict=True):
                _compact(buffer).copy_(_compact(x.detach()))
                buffer.requires_grad_(x.requires_grad)
            parameters = _stand_ins(module)
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            with Watch(device, buffers.values()):
                results = torch.func.functional_call(module, {**parameters, **buffers}, tuple(inputs))
                leaves = tree_leaves(results)
                used = [*inputs, *parameters.values(), *buffers.values()]
                if not are_own(leaves, used) or not set(gradients) <= set(range(len(leaves))):
                    return OUTPUTS
                uses, cast = uses_of(leaves)
                if any(uses[id(leaf)] > 1 for leaf in (*inputs, *parameters.values())):
                    return USES
                trained = {id(weight) for weight in weights or ()}
                others = (parameters[name] for name, one in module.named_parameters() if id(one) not in trained)
                if weights is not None and any(id(one) in cast for one in others):
                    return CASTS
                _backward(leaves, {n: _buffer(leaves[n], form[0]).zero_() for n, form in gradients.items()}, gradients)
            if any(p.grad is not None and p.grad.stride() != p.stride() for p in parameters.values()):
                return "a gradient has another form than its parameter"
    except NotStaticError as error:
        return str(error)
    except Exception as error:
        return f"it failed on copies of its inputs: {error}"
    finally:
        current.wait_stream(stream)
        set_random_state(before)
    return None


# Forms, and memory in these forms.


def _is_plain(value: Any, device: torch.device) -> bool:
    return type(value) is Tensor and value.device == device and value.layout is torch.strided and value.numel() > 0


def _has_hooks(module: nn.Module) -> bool:
    return bool(forward_hooks(module) or forward_pre_hooks(module) or any(backward_hooks(module)))


def _form_of(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.requires_grad, x.is_conj(), x.is_neg()


def _autocast(kind: str) -> tuple[Any, ...]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _gradient_form(gradient: Tensor) -> _GradientForm:
    return gradient.stride(), _autocast(gradient.device.type)


def _settings(device: torch.device) -> tuple[Any, ...]:
    """Return what decides, beside a part's code and inputs, which kernels run."""
    backends: Any = torch.backends  # of which some has no types
    cuda, cudnn = backends.cuda, backends.cudnn
    return (
        *(_autocast(device.type), torch.is_autocast_cache_enabled(), torch.get_default_dtype()),
        *(torch.get_default_device(), dispatch_mode_count(), function_mode_count()),
        *(torch.are_deterministic_algorithms_enabled(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        *(cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()),
        *(cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()),
    )


def _compact(x: Tensor) -> Tensor:
    """Return each element once where an expanded tensor has it several times."""
    for dimension, stride in enumerate(x.stride()):
        if stride == 0:
            x = x.narrow(dimension, 0, 1)
    return x


def _buffer(like: Tensor, strides: Sequence[int]) -> Tensor:
    """Return new memory in the shape of ``like`` with these strides; an expanded one has each element once."""
    sizes = [1 if stride == 0 else size for size, stride in zip(like.shape, strides, strict=True)]
    return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device).expand(like.shape)


def _buffer_like(x: Tensor) -> Tensor:
    return _buffer(x, x.stride())


def _stand_ins(module: nn.Module) -> dict[str, Tensor]:
    """Return leaves on the parameters' memory, with gradients, hooks and versions of their own."""
    return {name: nn.Parameter(one.data, one.requires_grad) for name, one in module.named_parameters()}


def _taken(leaf: Tensor) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _backward(results: Sequence[Tensor], gradients: dict[int, Tensor], forms: dict[int, _GradientForm]) -> None:
    kind = results[0].device.type
    is_on, dtype = next(iter(forms.values()))[1]
    with torch.autocast(kind, dtype, enabled=is_on):
        torch.autograd.backward([results[n] for n in gradients], list(gradients.values()), retain_graph=True)


# The parts of a model.


def parts_of(
    model: nn.Module, layers: Sequence[SplitLayer], on_call: Callable[[GraphedPart], None], counts: Counter[bool]
) -> tuple[list[GraphedPart], Counter[str]]:
    """Find modules whose code is static, with :data:`LEAST_LAYERS` layers or more; one that is called is the part.

    Returns:
        Those, not yet put in, and how many layers are in none, by reason.
    """
    parts: list[GraphedPart] = []
    outside: Counter[str] = Counter()
    by_module = {layer.module: layer for layer in layers}
    visited: set[nn.Module] = set()

    def visit(name: str, module: nn.Module, why: str, around: tuple[GraphedPart, ...]) -> None:
        if module in visited:
            return
        visited.add(module)
        own = [by_module[one] for one in module.modules() if one in by_module]
        if len(own) < LEAST_LAYERS:
            if own and not around:
                outside[why] += len(own)
            return
        part = GraphedPart(name, module, own, on_call, counts, around)
        reason = COMPILED if any(map(is_compiled, module.modules())) else part.why_not
        if reason is None:
            parts.append(part)
            around = (*around, part)
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}".removeprefix("."), child, reason or why, around)

    visit("", model, FEW, ())
    return parts, outside


@dataclass(frozen=True)
class GraphReport(Report):
    """Report of what CUDA graphs replayed.

    Args:
        parts: of the model that are captured.
        outside: numbers of layers that are in none of them, by reason.
        replays: calls of parts that replayed a graph.
        issued: calls of parts whose kernels were issued one by one though they were to be replayed, by reason.
    """

    parts: int
    outside: Mapping[str, int]
    replays: int
    issued: Mapping[str, int]

    def what_was_done(self) -> list[str]:
        return [f"graph: {self.replays} replays of {self.parts} parts"]

    def what_stayed_plain(self) -> list[str]:
        return [
            *each_because(self.issued, "calls without a replay"),
            *each_because(self.outside, "layers outside of graphs"),
        ]


def report_of(parts: Sequence[GraphedPart], outside: Counter[str]) -> GraphReport:
    """Report on these parts; ``outside`` has how many layers are in none of them, by reason."""
    outside, issued = outside.copy(), Counter[str]()
    captured = [part for part in parts if part.is_captured]
    inside = {layer for part in captured for layer in part.layers}
    for part in parts:
        issued.update(part.plain)
        if part.why_not is not None:
            outside[part.why_not] += len(set(part.layers) - inside)
    return GraphReport(len(captured), dict(outside), sum(part.replays for part in parts), dict(issued))
