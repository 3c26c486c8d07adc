"""Deferred weight gradients: first all output gradients, then the weight gradients of the first k blocks.

Out-of-order backprop (Oh et al. 2022, section 3, algorithm 2) on unmodified modules: every backward pass is split, and
finished where it ends. What cannot wait stays in order and is listed in ``layers_in_order``.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from torch import nn

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.torch_private import queue_callback
from retime.foundations.weight_gradients.layers import Block, Layer, group_into_blocks
from retime.foundations.weight_gradients.passes import UNNAMED, WaitingPass, current_backward
from retime.foundations.weight_gradients.split_backward import SplitBackward


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
        defers: whether forward passes may defer, asked at every call: not where gradients are not synchronised, say.
        on_block: called before the first weight gradient that waits (with None) and behind each block's.
        on_finished: called behind the last of them.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        k: Annotated[int, AtLeast(0)] = 0,
        *,
        blocks: Iterable[str] | None = None,
        defers: Callable[[], bool] = lambda: True,
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
        self._selected: set[Layer] = set()
        self._selected_for = -1
        self._split = SplitBackward(
            model, chosen=self._chosen, defers=defers, on_backward=self._finish_behind, on_order=self._group
        )

    @property
    def k(self) -> int:
        """How many blocks wait; all, where it is above their number."""
        return self._k

    @k.setter
    @checked
    def k(self, k: Annotated[int, AtLeast(0)]) -> None:
        self._k = k

    @property
    def layers(self) -> list[Layer]:
        """Of the model, in order of registration."""
        return self._split.layers

    @property
    def is_watching(self) -> bool:
        """Whether the first backward pass is still to come."""
        return self._split.first_pass.is_watching

    @property
    def layers_in_order(self) -> dict[str, int]:
        """How many layers cannot wait, by reason."""
        return self._split.layers_in_order

    @property
    def buffered_layers(self) -> dict[str, int]:
        """How many layers' weight gradients are computed in order and handed on later, by reason."""
        return self._split.buffered_layers

    @property
    def deferred_gradients(self) -> int:
        """Weight gradients, one a layer and backward pass, that were computed behind all output gradients."""
        return self._split.deferred_gradients

    @property
    def buffered_gradients(self) -> int:
        """Weight gradients that were computed in order and handed on behind all output gradients."""
        return self._split.buffered_gradients

    @property
    def input_bytes(self) -> dict[Layer, int]:
        """What the forward pass keeps for a layer's weight gradient."""
        return self._split.first_pass.input_bytes

    @property
    def waiting_bytes(self) -> dict[Layer, int]:
        """What must stay besides while the weight gradient waits: output gradients, or the finished gradient."""
        return self._split.first_pass.waiting_bytes

    def watch(self, root: Any) -> None:
        """Look at the graph under ``root`` (the loss, or what the model returned) before its first backward pass.

        Given every loss, this also guards each backward pass, as :meth:`guard` does.

        Raises:
            ValueError: a name in ``blocks`` is not a module of the model, or holds no layer.
        """
        self._split.watch(root)

    def guard(self, root: Any) -> None:
        """Let backward passes through ``root`` raise before they set any gradient, where they would have to raise.

        The model's own output is guarded always.
        """
        self._split.guard(root)

    def forget(self) -> None:
        """Drop what a pass left behind that failed; forward passes in flight keep what they need."""
        self._split.forget()

    def finish(self) -> None:
        """Compute the weight gradients that wait, block by block in forward order (algorithm 2, line 6)."""
        self._split.forget_forward()
        self.is_finishing = True
        try:
            self._on_block(None)
            for number, block in enumerate(self.blocks):  # those beyond k wait too if k was lowered since the forward
                self._split.finish(UNNAMED, block.layers)
                if number < self.k:
                    self._on_block(block)
        finally:
            self.is_finishing = False
        self._on_finished()

    def remove(self) -> None:
        """Take all hooks off."""
        self._split.remove()

    def _group(self, order: list[Layer]) -> None:
        self.blocks = group_into_blocks(self.model, order, self._names)
        self._selected_for = -1

    def _chosen(self) -> set[Layer]:
        if self._selected_for != self.k:
            self._selected = {la for block in self.blocks[: self.k] for la in block.layers if la.why_in_order is None}
            self._selected_for = self.k
        return self._selected

    def _finish_behind(self, one: WaitingPass) -> None:
        """A weight gradient waits: finish where its backward pass ends. What waits of another one failed."""
        one.forget_waiting(but=current_backward())
        queue_callback(self.finish)
