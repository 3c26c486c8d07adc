"""Deferred weight gradients: first all output gradients, then the weight gradients of the first k blocks.

Out-of-order backprop (Oh et al. 2022, section 3, algorithm 2) on unmodified modules, by hooks around their layers.
The first backward pass is watched and runs as ever: it shows the forward order, what each layer's piece of the autograd
graph looks like, and which parameters are used elsewhere too. What cannot wait stays in order and is listed in
``kept``.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from retime.mechanisms.arguments import AtLeast, checked
from retime.mechanisms.no_effect import NoEffectWarning
from retime.mechanisms.weight_gradients.cut import (
    DOUBLE_BACKWARD,
    Backward,
    Call,
    enter,
    leave,
    run_weight_gradient,
    why_whole,
)
from retime.mechanisms.weight_gradients.graph import USED_TWICE, Piece, Span, look_into, read_elsewhere, sequence_number
from retime.mechanisms.weight_gradients.hooks import Hook, is_special
from retime.mechanisms.weight_gradients.layers import (
    COMPILED,
    SMALL_BYTES,
    Block,
    Layer,
    find_layers,
    group_into_blocks,
)
from retime.mechanisms.weight_gradients.stand_ins import StandIns

CHECKPOINTED = "it runs under activation checkpointing or other saved-tensor hooks"
SMALL = "it is small"
NOT_CALLED = "it did not run in the first step"
USED_ELSEWHERE = "its parameters are read outside the layer"


class WeightGradientDeferral:
    """Lets the weight gradients of a model's first ``k`` blocks wait until all output gradients are done.

    In a bare loop on one device::

        deferral = WeightGradientDeferral(model, k=4)
        for batch in loader:
            loss = model(batch).sum()
            deferral.watch(loss)
            loss.backward()

    :param model: any module; parameters must not be replaced while this is attached.
    :param k: how many blocks, counted in forward order; may be set at any time between two steps.
    :param blocks: names of the modules that are the blocks; None: the repeated blocks, else single layers.
    """

    @checked
    def __init__(
        self, model: nn.Module, k: Annotated[int, AtLeast(0)] = 0, *, blocks: Iterable[str] | None = None
    ) -> None:
        self.model = model
        self.layers = find_layers(model)
        self.blocks: list[Block] = []
        self._k = k
        self.armed = True
        """Whether forward passes from now on may defer; the owner turns it off where gradients are not synchronised."""
        self.on_block: Callable[[Block | None], None] = lambda block: None
        """Called before the first weight gradient that waits (with None) and behind each block's."""
        self.on_finished: Callable[[], None] = lambda: None
        self.is_finishing = False
        self.deferred_gradients = self.held_gradients = 0
        self.input_bytes: dict[Layer, int] = {}
        """What the forward pass keeps for a layer's weight gradient."""
        self.waiting_bytes: dict[Layer, int] = {}
        """What must stay besides while the weight gradient waits: output gradients, or the finished gradient."""
        self._names = list(blocks) if blocks is not None else None
        self._watching = True
        self._order: list[Layer] = []
        self._watched: list[Span] = []
        self._open: list[Call | None] = []
        self._backward = Backward(self._on_output_gradient)
        self._cuts: list[tuple[Node, Call]] = []
        """Of the forward pass that is under way, or was last."""
        self._waiting: dict[Layer, list[Call]] = {}
        self._stand_ins: dict[Layer, StandIns] = {}
        self._queued = self._keep_graph = False
        self._selected: set[Layer] = set()
        self._selected_for = -1
        self._parameters: list[Tensor] = list(model.parameters())
        self._looking = False
        """Whether the forward pass under way is only looked at: what is frozen in it was not so before."""
        self._state: tuple[bool, ...] = ()
        self._seen: set[tuple[bool, ...]] = set()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True),
            model.register_forward_hook(Hook(self._end)),
        ]
        for layer in self.layers:
            if layer.kept == COMPILED:
                continue
            before, after = Hook(partial(self._before, layer)), Hook(partial(self._after, layer))
            self._handles += [
                layer.module.register_forward_pre_hook(before, with_kwargs=True),
                layer.module.register_forward_hook(after, prepend=True, always_call=True),
            ]

    @property
    def k(self) -> int:
        """How many blocks wait; all, where it is above their number."""
        return self._k

    @k.setter
    @checked
    def k(self, k: Annotated[int, AtLeast(0)]) -> None:
        self._k = k

    @property
    def is_watching(self) -> bool:
        """Whether the first backward pass is still to come."""
        return self._watching

    @property
    def kept(self) -> dict[str, int]:
        """How many layers cannot wait, by reason."""
        return dict(Counter(layer.kept for layer in self.layers if layer.kept is not None))

    @property
    def held(self) -> dict[str, int]:
        """How many layers' weight gradients are computed in order and handed on later, by reason."""
        return dict(Counter(la.held for la in self.layers if la.kept is None and la.held is not None))

    def watch(self, root: Any) -> None:
        """Look at the graph under ``root`` (the loss, or what the model returned) before its first backward pass.

        Given every loss, this also guards each backward pass, as :meth:`guard` does.
        """
        self.guard(root)
        if not self._watching or not self._watched:
            return
        roots = _roots(root)
        if not roots:
            return
        called = set(self._order)
        for layer in self.layers:
            if layer.kept is None and layer not in called:
                layer.kept = NOT_CALLED
        self._look(roots)
        self.blocks = group_into_blocks(self.model, self._order, self._names)
        self._watching = False

    def _look(self, roots: list[Tensor]) -> None:
        outside = read_elsewhere(roots, self._watched)
        for layer in self.layers:
            if layer.kept is None and any(p in outside for p in layer.parameters):
                layer.kept = USED_ELSEWHERE
        self._watched.clear()

    def _begin(self, args: Any, kwargs: Any) -> None:
        """The model is about to run. Once anything has been frozen or thawed, its graph is looked at anew."""
        self._looking = False
        if not self._defers() or is_special():
            return
        self._cuts = []
        with torch._C.DisableTorchFunctionSubclass():  # parameters may wait for updates, and this is no read of them
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._state = tuple(tensor.requires_grad for tensor in (*self._parameters, *given))
        if not self._watching:
            self._watched.clear()
            self._looking = self.k > 0 and self._state not in self._seen

    def _end(self, args: Any, output: Any) -> None:
        """The model has run."""
        if not self._defers() or is_special():
            return
        if self._looking:
            self._look(_roots(output))
        if self._looking or self._watching:
            self._seen.add(self._state)
        self._looking = False
        self.guard(output)

    def _defers(self) -> bool:
        return self.armed and torch.is_grad_enabled()

    def guard(self, root: Any) -> None:
        """Let backward passes through ``root`` raise before they set any gradient, where they would have to raise.

        The model's own output is guarded always.
        """
        cuts, stand_ins = self._cuts, self._stand_ins
        if cuts or stand_ins:
            for tensor in _roots(root):
                tensor.register_hook(lambda _: self._check(cuts, stand_ins))  # type: ignore[no-untyped-call]

    def _check(self, cuts: list[tuple[Node, Call]], stand_ins: dict[Layer, StandIns]) -> None:
        """A backward pass has begun.

        Raises:
            RuntimeError: it makes a graph of itself, or parameters get gradients from elsewhere that they did not get
                in the first step.
        """
        if not self._backward.is_whole():
            return
        runs = torch._C._will_engine_execute_node
        cuts = [(node, call) for node, call in cuts if runs(node)]
        if cuts and torch.is_grad_enabled():
            raise RuntimeError(f"{DOUBLE_BACKWARD}. No gradient has been set")
        torn = {call.layer for _, call in cuts if any(runs(leaf) for leaf in call.leaves)}
        torn |= {layer for layer, one in stand_ins.items() if one.is_torn()}
        for layer in torn:
            layer.kept = USED_ELSEWHERE
        if torn:
            names = ", ".join(repr(layer.name) for layer in torn)
            raise RuntimeError(
                f"the parameters of {names} get gradients from outside of the layer that they did not get in the first "
                "step, so out-of-order backprop would add them up in two goes. No gradient has been set: run this step "
                "again, now in order; or use k=0, or a k below this layer"
            )

    def forget(self) -> None:
        """Drop what a forward pass left behind whose backward pass never came."""
        self._waiting.clear()
        self._open.clear()
        self._cuts = []
        self._queued = False
        for stand_ins in self._stand_ins.values():
            stand_ins.take_out()
        self._stand_ins.clear()
        if self._watching:
            self._watched.clear()
            self._order.clear()
            self.input_bytes.clear()
            self.waiting_bytes.clear()

    def finish(self) -> None:
        """Compute the weight gradients that wait, block by block in forward order (algorithm 2, line 6)."""
        waiting, self._waiting = self._waiting, {}
        stand_ins, self._stand_ins, self._cuts = self._stand_ins, {}, []
        self._queued = False
        self.is_finishing = True
        try:
            self.on_block(None)
            for number, block in enumerate(self.blocks):
                for layer in block.layers:  # those beyond k wait too if k was lowered since the forward pass
                    self._run(layer, waiting.get(layer), stand_ins.get(layer))
                if number < self.k:
                    self.on_block(block)
        finally:
            self.is_finishing = False
        if self._keep_graph:
            self._stand_ins = stand_ins
        self.on_finished()

    def _run(self, layer: Layer, calls: list[Call] | None, stand_ins: StandIns | None) -> None:
        try:
            if calls is not None:
                self.deferred_gradients += run_weight_gradient(calls)
            elif stand_ins is not None:
                self.held_gradients += bool(stand_ins.hand_on(release=not self._keep_graph))
        except RuntimeError as error:
            if "marked" in str(error) and "ready" in str(error):
                error.add_note(f"retime: the parameters of {layer.name!r} are read by other code too: use k=0")
            raise

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.forget()

    def _chosen(self) -> set[Layer]:
        if self._selected_for != self.k:
            self._selected = {la for block in self.blocks[: self.k] for la in block.layers if la.kept is None}
            self._selected_for = self.k
        return self._selected

    def _on_output_gradient(self, call: Call) -> None:
        self._finish_after_this_backward()
        self._waiting.setdefault(call.layer, []).append(call)

    def _finish_after_this_backward(self) -> None:
        if not self._queued:
            self._queued = True
            self._keep_graph = bool(torch._C._autograd._get_current_graph_task_keep_graph())
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _before(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """A layer is about to run."""
        self._open.append(None)
        if not self._defers() or is_special():
            return None
        if self._watching or self._looking:
            if self._watching and layer not in self._order:
                self._order.append(layer)
            if layer.kept is None:
                self._open[-1], *_ = enter(layer, sequence_number(), args, kwargs, rename_inputs=False)
            return None
        if layer not in self._chosen() or layer.kept is not None or not layer.trainable():
            return None
        if layer.held is not None:
            if layer not in self._stand_ins:
                self._stand_ins[layer] = StandIns(layer, self._finish_after_this_backward)
            self._stand_ins[layer].put_in()
            return None
        call, args, kwargs = enter(layer, sequence_number(), args, kwargs, rename_inputs=True)
        self._open[-1] = call
        return args, kwargs

    def _after(self, layer: Layer, args: Any, output: Any) -> Any:
        """A layer has run, or failed."""
        if layer in self._stand_ins:
            self._stand_ins[layer].take_out()
        call = self._open.pop() if self._open else None
        found = leave(call, output) if call is not None else []
        if call is None or not found:
            return None
        looking = self._watching or self._looking
        piece = _piece_of(call, output, found)
        if piece.reason is not None and layer.held is None:
            layer.held = piece.reason
            if piece.reason == USED_TWICE and not looking:
                warnings.warn(
                    f"the order of {layer.name!r} does not change from now on: {USED_TWICE}, which it did not in the "
                    "first step, and in this one they may round differently; use k=0 to rule that out",
                    NoEffectWarning,
                    stacklevel=2,
                )
        if looking:
            outputs = frozenset(edge.node for edge in call.outputs)
            self._watched.append(Span(call.since, sequence_number(), outputs, frozenset(layer.parameters)))
            if self._watching:
                self._measure(call, found)
            return None
        if piece.reason is not None:
            return None
        call.leaves = piece.leaves
        call.inputs = [edge for edge, is_read in zip(call.inputs, piece.reads, strict=True) if is_read]
        call.originals = [tensor for tensor, is_read in zip(call.originals, piece.reads, strict=True) if is_read]
        node, output = self._backward.cut(call, output, found[0])
        self._cuts.append((node, call))
        return output

    def _measure(self, call: Call, found: list[Tensor]) -> None:
        layer = call.layer
        waits = found if layer.held is None else layer.trainable()
        for sizes, tensors in ((self.input_bytes, call.originals), (self.waiting_bytes, waits)):
            sizes[layer] = sizes.get(layer, 0) + sum(t.numel() * t.element_size() for t in tensors)


def _piece_of(call: Call, output: Any, found: list[Tensor]) -> Piece:
    layer = call.layer
    reason = why_whole(call, output, found)
    if reason is None and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        reason = CHECKPOINTED
    if reason is None and layer.size_bytes <= SMALL_BYTES and call.inputs:
        reason = SMALL
    return Piece(reason) if reason else look_into(call.outputs[0], call.inputs, set(layer.parameters), call.since)


def _roots(output: Any) -> list[Tensor]:
    """What a model returns and computed; a hook on a leaf would stay."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
