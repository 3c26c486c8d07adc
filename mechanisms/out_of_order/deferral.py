"""Deferred weight gradients: first all output gradients, then the weight gradients of the first k blocks.

Out-of-order backprop (Oh et al. 2022, section 3, algorithm 2) on unmodified modules, by hooks around their layers.
The first backward pass is watched and runs as ever: it shows the forward order, what each layer's piece of the autograd
graph looks like, and which parameters are used elsewhere too. What cannot wait stays in order and is listed in
``kept``.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from retime.mechanisms.out_of_order.cut import Backward, Call, changed_its_input, enter, leave, run_weight_gradient
from retime.mechanisms.out_of_order.graph import FOREIGN, leaves_outside, sequence_number, why_inseparable
from retime.mechanisms.out_of_order.held import StandIns
from retime.mechanisms.out_of_order.layers import COMPILED, SMALL_BYTES, Block, Layer, find_layers, group_into_blocks

CHANGES_INPUT = "it changes its input in place"
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
            deferral.watch(loss)  # looks at the first loss only
            loss.backward()

    :param model: any module; parameters must not be replaced while this is attached.
    :param k: how many blocks, counted in forward order; may be set at any time between two steps.
    :param blocks: names of the modules that are the blocks; None: the repeated blocks, else single layers.
    """

    def __init__(self, model: nn.Module, k: int = 0, *, blocks: Iterable[str] | None = None) -> None:
        self.model = model
        self.layers = find_layers(model)
        self.blocks: list[Block] = []
        self.k = k
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
        self._watched: list[Call] = []
        self._open: list[Call | None] = []
        self._backward = Backward(self._on_output_gradient)
        self._waiting: dict[Layer, list[Call]] = {}
        self._stand_ins: dict[Layer, StandIns] = {}
        self._queued = self._keep_graph = False
        self._selected: set[Layer] = set()
        self._selected_for = -1
        self._handles: list[Any] = []
        for layer in self.layers:
            if layer.kept == COMPILED:
                continue
            hooks = _Hooks(self, layer)
            self._handles += [
                layer.module.register_forward_pre_hook(hooks.before, with_kwargs=True),
                layer.module.register_forward_hook(hooks.after, with_kwargs=True, prepend=True, always_call=True),
            ]

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
        """Look at the graph under ``root`` (the loss, or what the model returned), once, before its backward pass."""
        if not self._watching or not self._watched:
            return
        roots = [leaf for leaf in pytree.tree_leaves(root) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not roots:
            return
        calls = {edge.node: [e.node for e in call.inputs] for call in self._watched for edge in call.outputs}
        outside = leaves_outside(roots, calls)
        called = set(self._order)
        for layer in self.layers:
            if layer.kept is None and layer not in called:
                layer.kept = NOT_CALLED
            elif layer.kept is None and any(p in outside for p in layer.parameters):
                layer.kept = USED_ELSEWHERE
        self.blocks = group_into_blocks(self.model, self._order, self._names)
        self._watching = False
        self._watched.clear()

    def forget(self) -> None:
        """Drop what a forward pass left behind whose backward pass never came."""
        self._waiting.clear()
        self._open.clear()
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
        stand_ins, self._stand_ins = self._stand_ins, {}
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
                run_weight_gradient(calls)
                self.deferred_gradients += 1
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

    def before(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """A layer is about to run."""
        self._open.append(None)
        if not (self.armed and torch.is_grad_enabled()) or _is_special():
            return None
        if self._watching:
            if layer not in self._order:
                self._order.append(layer)
            if layer.kept is None:
                self._open[-1], *_ = enter(layer, sequence_number(), args, kwargs, rename_inputs=False)
            return None
        if layer not in self._chosen() or layer.kept is not None:
            return None
        if layer.held is not None:
            if layer not in self._stand_ins:
                self._stand_ins[layer] = StandIns(layer, self._finish_after_this_backward)
            self._stand_ins[layer].put_in()
            return None
        call, args, kwargs = enter(layer, sequence_number(), args, kwargs, rename_inputs=True)
        self._open[-1] = call
        return args, kwargs

    def after(self, layer: Layer, output: Any) -> Any:
        """A layer has run, or failed."""
        if layer in self._stand_ins:
            self._stand_ins[layer].take_out()
        call = self._open.pop() if self._open else None
        found = leave(call, output) if call is not None else []
        if call is None or not found:
            return None
        reason = _why_held(call)
        if self._watching:
            layer.held = layer.held or reason
            if reason != FOREIGN:
                self._watched.append(call)
            self._measure(call, found)
            return None
        return self._backward.cut(call, output, found) if reason is None else None

    def _measure(self, call: Call, found: list[Tensor]) -> None:
        layer = call.layer
        waits = found if layer.held is None else layer.parameters
        for sizes, tensors in ((self.input_bytes, call.originals), (self.waiting_bytes, waits)):
            sizes[layer] = sizes.get(layer, 0) + sum(t.numel() * t.element_size() for t in tensors)
        call.originals = []


def _why_held(call: Call) -> str | None:
    layer = call.layer
    if changed_its_input(call):
        return CHANGES_INPUT
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return CHECKPOINTED
    if layer.size_bytes <= SMALL_BYTES and call.inputs:
        return SMALL
    return why_inseparable(call.outputs, call.inputs, set(layer.parameters), call.since)


class _Hooks:
    """The hooks of one layer. A copy of the module, or a pickled one, gets hooks that do nothing."""

    def __init__(self, deferral: WeightGradientDeferral | None = None, layer: Layer | None = None) -> None:
        self._deferral, self._layer = deferral, layer

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._deferral is None or self._layer is None:
            return None
        return self._deferral.before(self._layer, args, kwargs)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self._deferral is None or self._layer is None:
            return None
        return self._deferral.after(self._layer, output)

    def __deepcopy__(self, memo: Any) -> "_Hooks":
        return _Hooks()

    def __reduce__(self) -> Any:
        return _Hooks, ()


def _is_special() -> bool:
    """Inside a backward pass (checkpointing recomputes there) or a function transform."""
    return (
        torch._C._current_graph_task_id() != -1
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
