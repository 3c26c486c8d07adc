"""Hooks around a model and its layers, which cut each call out of the graph or put stand-ins in.

What cannot be cut is computed in order and handed on later; a layer that cannot even do that keeps its place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.no_effect import warn_difference
from retime.foundations.torch_private import next_sequence_number, top_saved_tensors_hooks
from retime.foundations.weight_gradients.cut import Anchor, Call, enter, leave, why_whole
from retime.foundations.weight_gradients.first_pass import FirstPass
from retime.foundations.weight_gradients.graph import USED_TWICE, Piece, look_into
from retime.foundations.weight_gradients.guard import Guard
from retime.foundations.weight_gradients.hooks import Hook, is_special
from retime.foundations.weight_gradients.layers import COMPILED, SMALL_BYTES, Layer
from retime.foundations.weight_gradients.passes import Forward, PassesInFlight

CHECKPOINTED = "it runs under activation checkpointing or other saved-tensor hooks"
SMALL = "it is small"


class LayerHooks:
    """Splits the forward passes of a model: its layers' weight gradients wait in the pass that is current then.

    Args:
        model: whose layers these are.
        layers: those that :func:`find_layers` found.
        passes: where weight gradients wait.
        first_pass: shown every call until it has seen enough.
        guard: put on what the model returns.
        anchor: of the cut nodes.
        chosen: the layers whose weight gradients wait at the moment.
        defers: whether forward passes may be split at the moment.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        passes: PassesInFlight,
        first_pass: FirstPass,
        guard: Guard,
        anchor: Anchor,
        *,
        chosen: Callable[[], set[Layer]],
        defers: Callable[[], bool],
    ) -> None:
        self._passes = passes
        self._first_pass = first_pass
        self._guard = guard
        self._anchor = anchor
        self._chosen = chosen
        self._may_defer = defers
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
        return torch.is_grad_enabled() and self._may_defer()

    def _begin(self, args: Any, kwargs: Any) -> None:
        """The model is about to run. Once anything has been frozen or thawed, its graph is looked at anew."""
        self._first_pass.is_looking = False
        if not self._defers() or is_special():
            return
        self._forward = Forward(self._passes.current)
        self._first_pass.begin(args, kwargs, any_waits=bool(self._chosen()))

    def _end(self, args: Any, output: Any) -> None:
        """The model has run."""
        if not self._defers() or is_special():
            return
        self._first_pass.end(output)
        self.guard(output)

    def _before(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """A layer is about to run."""
        self._open.append(None)
        if not self._defers() or is_special():
            return None
        if self._first_pass.is_on:
            self._first_pass.note_layer(layer)
            if layer.why_in_order is None:
                self._open[-1], *_ = enter(layer, next_sequence_number(), args, kwargs, rename_inputs=False)
            return None
        if layer not in self._chosen() or layer.why_in_order is not None or not layer.trainable():
            return None
        if layer.why_buffered is not None:
            self._passes.current.stand_ins_of(layer).put_in()
            return None
        call, args, kwargs = enter(layer, next_sequence_number(), args, kwargs, rename_inputs=True)
        self._open[-1] = call
        return args, kwargs

    def _after(self, layer: Layer, args: Any, output: Any) -> Any:
        """A layer has run, or failed."""
        stand_ins = self._passes.current.stand_ins.get(layer)
        if stand_ins is not None:
            stand_ins.take_out()
        call = self._open.pop() if self._open else None
        found = leave(call, output) if call is not None else []
        if call is None or not found:
            return None
        piece = _piece_of(call, output, found)
        if piece.reason is not None and layer.why_buffered is None:
            layer.why_buffered = piece.reason
            if piece.reason == USED_TWICE and not self._first_pass.is_on:
                warn_difference(
                    f"the order of {layer.name!r} does not change from now on: {USED_TWICE}, which it did not in the "
                    "first step, and in this one they may round differently; use k=0 to rule that out"
                )
        if self._first_pass.is_on:
            self._first_pass.note_call(call, found)
            return None
        return self._cut(call, output, found[0], piece) if piece.reason is None else None

    def _cut(self, call: Call, output: Any, found: Tensor, piece: Piece) -> Any:
        call.leaves = piece.leaves
        call.inputs = [edge for edge, is_read in zip(call.inputs, piece.reads, strict=True) if is_read]
        call.originals = [tensor for tensor, is_read in zip(call.originals, piece.reads, strict=True) if is_read]
        current = self._passes.current
        node, output = self._anchor.cut(call, output, found, current.note)
        if self._forward is None or self._forward.of is not current:  # the layer was called by itself
            self._forward = Forward(current)
        self._forward.add(node)
        return output


def _piece_of(call: Call, output: Any, found: list[Tensor]) -> Piece:
    layer = call.layer
    reason = why_whole(call, output, found)
    if reason is None and top_saved_tensors_hooks(True) is not None:
        reason = CHECKPOINTED
    if reason is None and layer.size_bytes <= SMALL_BYTES and call.inputs:
        reason = SMALL
    return Piece(reason) if reason else look_into(call.outputs[0], call.inputs, set(layer.parameters), call.since)
