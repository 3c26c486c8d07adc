"""The backward pass of a model in two halves: output gradients when autograd runs, weight gradients when asked for."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.messages import warn_difference
from retime.foundations.torch_private.engine import (
    check_saved_values,
    forward_ad_level,
    graph_task_id,
    in_function_transform,
    next_sequence_number,
    queue_callback,
    top_saved_tensors_hooks,
)
from retime.foundations.weight_gradients.cut import (
    COMPILED,
    SMALL_BYTES,
    USED_TWICE,
    Anchor,
    Block,
    Call,
    Layer,
    Piece,
    enter,
    find_layers,
    group_into_blocks,
    leave,
    look_into,
    why_whole,
)
from retime.foundations.weight_gradients.passes import UNNAMED, FirstPass, Forward, Guard, PassesInFlight, WaitingPass

# Hooks on modules that stay behind when a module is copied.


class Hook:
    """Calls ``act`` with what a module's hook is given, but for the module; in a copy or a pickled module, nothing."""

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self._act = act

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if self._act is None or torch.compiler.is_compiling():
            return None
        return self._act(*given)

    def __reduce__(self) -> Any:
        return Hook, ()


# Hooks around a model and its layers, which cut each call out of the graph or put stand-ins in.
#
# What cannot be cut is computed in order and handed on later; a layer that cannot even do that keeps its place.

CHECKPOINTED = "it runs under activation checkpointing or other saved-tensor hooks"
SMALL = "it is small"


class LayerHooks:
    """Splits the forward passes of a model: its layers' weight gradients wait in the pass that is current then.

    Args:
        model: whose layers these are.
        layers: those that :func:`find_layers` found.
        passes: where weight gradients wait.
        first_pass: shown every call until it has seen enough.
    """

    def __init__(self, model: nn.Module, layers: list[Layer], passes: PassesInFlight, first_pass: FirstPass) -> None:
        self._passes = passes
        self._first_pass = first_pass
        self._anchor = Anchor()
        self._guard = Guard(self._anchor)
        self._open: list[Call | None] = []
        """The calls under way, inner ones last."""
        self._forward: Forward | None = None
        """The forward pass that is under way, or was last."""
        self._handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True),
            model.register_forward_hook(Hook(self._end)),
        ]
        for layer in layers:
            if layer.why_in_order == COMPILED:
                continue
            before, after = Hook(partial(self._before, layer)), Hook(partial(self._after, layer))
            self._handles += [
                layer.module.register_forward_pre_hook(before, with_kwargs=True),
                layer.module.register_forward_hook(after, prepend=True, always_call=True),
            ]

    def guard(self, root: Any) -> None:
        """Guard what the owner computed from the forward pass that was last."""
        if self._forward is not None:
            self._guard.put_on(root, self._forward)

    def forget_forward(self) -> None:
        """The forward pass that was last belongs to a backward pass that is done."""
        self._forward = None

    def forget(self) -> None:
        """Drop what a forward pass left behind that failed."""
        self._open.clear()
        self._forward = None

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _defers(self) -> bool:
        """Not inside of a backward pass (checkpointing recomputes there) or of a function transform."""
        if not torch.is_grad_enabled() or not self._passes.splits:
            return False
        return graph_task_id() == -1 and not in_function_transform() and forward_ad_level() < 0

    def _begin(self, args: Any, kwargs: Any) -> None:
        """The model is about to run. Once anything has been frozen or thawed, its graph is looked at anew."""
        self._first_pass.is_looking = False
        if not self._defers():
            return
        self._forward = Forward(self._passes.current)
        self._first_pass.begin(args, kwargs, any_waits=bool(self._passes.chosen))

    def _end(self, args: Any, output: Any) -> None:
        """The model has run."""
        if not self._defers():
            return
        self._first_pass.end(output)
        self.guard(output)

    def _before(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """A layer is about to run."""
        self._open.append(None)
        if not self._defers():
            return None
        if self._first_pass.is_on:
            self._first_pass.note_layer(layer)
            if layer.why_in_order is None:
                self._open[-1], *_ = enter(layer, next_sequence_number(), args, kwargs, rename_inputs=False)
            return None
        if layer not in self._passes.chosen or layer.why_in_order is not None or not layer.trainable():
            return None
        if layer.why_buffered is not None:
            self._passes.current.buffered_of(layer).put_in()
            return None
        call, args, kwargs = enter(layer, next_sequence_number(), args, kwargs, rename_inputs=True)
        self._open[-1] = call
        return args, kwargs

    def _after(self, layer: Layer, args: Any, output: Any) -> Any:
        """A layer has run, or failed."""
        buffered = self._passes.current.buffered.get(layer)
        if buffered is not None:
            buffered.take_out()
        call = self._open.pop() if self._open else None
        outputs = leave(call, output) if call is not None else []
        if call is None or not outputs:
            return None
        piece = _piece_of(call, output, outputs)
        if piece.reason is not None and layer.why_buffered is None:
            layer.why_buffered = piece.reason
            if piece.reason == USED_TWICE and not self._first_pass.is_on:
                warn_difference(
                    f"the gradients of {layer.name!r} stay in order from now on: {USED_TWICE}. It did not in the first "
                    "step, so they may round differently in this one; use k=0 to rule that out"
                )
        if self._first_pass.is_on:
            self._first_pass.note_call(call, outputs)
            return None
        return self._cut(call, output, outputs[0], piece) if piece.reason is None else None

    def _cut(self, call: Call, output: Any, hidden: Tensor, piece: Piece) -> Any:
        call.leaves = piece.leaves
        call.inputs = [edge for edge, is_read in zip(call.inputs, piece.reads, strict=True) if is_read]
        call.originals = [tensor for tensor, is_read in zip(call.originals, piece.reads, strict=True) if is_read]
        current = self._passes.current
        node, output = self._anchor.cut(call, output, hidden, current.note)
        if self._forward is None or self._forward.of is not current:  # the layer was called by itself
            self._forward = Forward(current)
        self._forward.cuts.append(weakref.ref(node))
        return output


def _piece_of(call: Call, output: Any, outputs: list[Tensor]) -> Piece:
    layer = call.layer
    reason = why_whole(call, output, outputs)
    if reason is None and top_saved_tensors_hooks(True) is not None:
        reason = CHECKPOINTED
    if reason is None and layer.size_bytes <= SMALL_BYTES and call.inputs:
        reason = SMALL
    return Piece(reason) if reason else look_into(call.outputs[0], call.inputs, set(layer.parameters), call.since)


# The two halves of a backward pass, pass by pass.


class SplitBackward:
    """Lets the weight gradients of a model's layers wait, pass by pass, until they are asked for.

    A pass is what belongs to one micro-batch: its forward and backward passes. Several can be in flight, and each is
    finished, layer by layer if need be, or dropped without the others::

        split = SplitBackward(stage)
        split.watch(stage(example))                  # shows the order; this pass runs as ever
        with split.passes.begin(0):
            first = stage(micro_batches[0])
        with split.passes.begin(1):
            second = stage(micro_batches[1])
        second.backward(gradients[1])                # output gradients only
        first.backward(gradients[0])
        split.passes.finish(0, split.first_pass.order[:1])
        split.passes.finish(0)                       # what is left of it, in forward order
        split.passes.finish(1)

    Gradients are the same bits as those of plain backward passes in the order in which passes are finished. Layers that
    cannot wait (``layers_in_order``) get theirs in the backward pass. Forward passes outside of ``passes.begin`` belong
    to one pass without a key (None), which begins anew with each backward pass.

    Args:
        model: any module; parameters must not be replaced while this is attached.
        on_backward: called with the pass, inside of each backward pass, when its first weight gradient begins to wait.
        on_order: called with the layers in forward order, as soon as the first pass has shown it.

    Attributes:
        layers: in order of registration.
        passes: in flight; the weight gradients of all layers wait at first.
        first_pass: what it has shown; ``first_pass.order`` are the layers in forward order.
        hooks: on the model and its layers.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        on_backward: Callable[[WaitingPass], None] = lambda one: None,
        on_order: Callable[[list[Layer]], None] = lambda order: None,
    ) -> None:
        check_saved_values()
        self.layers = find_layers(model)
        self.first_pass = FirstPass(model, self.layers, on_order)
        self.passes = PassesInFlight(on_backward, self.layers, self.first_pass.order)
        self.hooks = LayerHooks(model, self.layers, self.passes, self.first_pass)

    @property
    def layers_in_order(self) -> dict[str, int]:
        """Number of layers that cannot wait, by reason."""
        return dict(Counter(layer.why_in_order for layer in self.layers if layer.why_in_order is not None))

    @property
    def buffered_layers(self) -> dict[str, int]:
        """Number of layers whose weight gradients are computed in order and handed on later, by reason."""
        return dict(
            Counter(la.why_buffered for la in self.layers if la.why_in_order is None and la.why_buffered is not None)
        )

    def watch(self, root: Any) -> None:
        """Look at the graph under ``root`` (the loss, or what the model returned) before its first backward pass.

        Given every loss, this also lets each backward pass raise before it sets any gradient, where it would have to
        raise; the model's own output is guarded always. ``root`` must come from the forward pass that was last.
        """
        self.hooks.guard(root)
        self.first_pass.finish(root)

    def forget(self) -> None:
        """Drop what a forward or backward pass without a key left behind that failed; keyed passes stay."""
        self.hooks.forget()
        self.first_pass.forget()
        self.passes.unnamed.forget()

    def remove(self) -> None:
        """Take all hooks off, and drop every pass."""
        self.hooks.remove()
        self.forget()
        for key in list(self.passes.in_flight):
            self.passes.drop(key)


# Deferred weight gradients: first all output gradients, then the weight gradients of the first k blocks.
#
# Out-of-order backprop (Oh et al. 2022, section 3, algorithm 2) on unmodified modules: every backward pass is split,
# and finished where it ends. What cannot wait stays in order and is listed in ``layers_in_order``.


class WeightGradientDeferral:
    """Lets the weight gradients of a model's first ``k`` blocks wait until all output gradients are done.

    In a bare loop on one device::

        deferral = WeightGradientDeferral(model, k=4)
        for batch in loader:
            loss = model(batch).sum()
            deferral.watch(loss)
            loss.backward()

    Args:
        model: any module; parameters must not be replaced while this is attached.
        k: how many blocks, counted in forward order; may be set at any time between two steps.
        blocks: names of the modules that are the blocks; None: the repeated blocks, else single layers.
        on_block: called before the first weight gradient that waits (with None) and behind each block's.
        on_finished: called behind the last of them.

    Attributes:
        split: what waits, and why some layers do not.
        blocks: in forward order, once the first pass has shown it.
        is_finishing: weight gradients that waited are being computed.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        k: Annotated[int, AtLeast(0)] = 0,
        *,
        blocks: Iterable[str] | None = None,
        on_block: Callable[[Block | None], None] = lambda block: None,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.blocks: list[Block] = []
        self.is_finishing = False
        self._k = k
        self._names = list(blocks) if blocks is not None else None
        self._on_block = on_block
        self._on_finished = on_finished
        self.split = SplitBackward(model, on_backward=self._finish_behind, on_order=self._group)
        self.split.passes.chosen = set()

    @property
    def k(self) -> int:
        """Number of blocks that wait; all, where it is above their number."""
        return self._k

    @k.setter
    @checked
    def k(self, k: Annotated[int, AtLeast(0)]) -> None:
        self._k = k
        self._choose()

    def watch(self, root: Any) -> None:
        """Look at the graph under ``root`` (the loss, or what the model returned) before its first backward pass.

        Given every loss, this also guards each backward pass, as :meth:`SplitBackward.watch` does.

        Raises:
            ValueError: a name in ``blocks`` is not a module of the model, or holds no layer.
        """
        self.split.watch(root)

    def finish(self) -> None:
        """Compute the weight gradients that wait, block by block in forward order (algorithm 2, line 6)."""
        self.split.hooks.forget_forward()
        self.is_finishing = True
        try:
            self._on_block(None)
            for number, block in enumerate(self.blocks):  # those beyond k wait too if k was lowered since the forward
                self.split.passes.finish(UNNAMED, block.layers)
                if number < self.k:
                    self._on_block(block)
        finally:
            self.is_finishing = False
        self._on_finished()

    def remove(self) -> None:
        """Take all hooks off."""
        self.split.remove()

    def _group(self, order: list[Layer]) -> None:
        self.blocks = group_into_blocks(self.model, order, self._names)
        self._choose()

    def _choose(self) -> None:
        chosen = [layer for block in self.blocks[: self._k] for layer in block.layers]
        self.split.passes.chosen = {layer for layer in chosen if layer.why_in_order is None}

    def _finish_behind(self, one: WaitingPass) -> None:
        """A weight gradient waits: finish where its backward pass ends. What waits of another one failed."""
        one.forget_waiting(but=graph_task_id())
        queue_callback(self.finish)
