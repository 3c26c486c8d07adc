"""The backward pass of a model in two halves: output gradients when autograd runs, weight gradients when asked for."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from torch import nn

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.torch_private.engine import check_saved_values, graph_task_id, queue_callback
from retime.foundations.weight_gradients.cut import Block, Layer, find_layers, group_into_blocks
from retime.foundations.weight_gradients.passes import (
    UNNAMED,
    FirstPass,
    LayerHooks,
    PassesInFlight,
    WaitingPass,
)


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
        """How many layers cannot wait, by reason."""
        return dict(Counter(layer.why_in_order for layer in self.layers if layer.why_in_order is not None))

    @property
    def buffered_layers(self) -> dict[str, int]:
        """How many layers' weight gradients are computed in order and handed on later, by reason."""
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
        """How many blocks wait; all, where it is above their number."""
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
