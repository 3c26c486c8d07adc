"""Backward passes that would add gradients up in another order are refused before they set any gradient."""

from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private import keeps_graph, tree_leaves, will_execute
from retime.foundations.weight_gradients.cut import DOUBLE_BACKWARD, Anchor
from retime.foundations.weight_gradients.passes import Forward, WaitingPass, current_backward

USED_ELSEWHERE = "its parameters are read outside the layer"


class Guard:
    """Looks at each backward pass when it begins, by hooks on what the model returned.

    Args:
        anchor: of the cut nodes of the model.
    """

    def __init__(self, anchor: Anchor) -> None:
        self._anchor = anchor
        self._last: tuple[int, WaitingPass] | None = None
        """The backward pass that was looked at last, and the pass that it went through."""

    def put_on(self, root: Any, forward: Forward) -> None:
        """Let backward passes through ``root`` raise before they set any gradient, where they would have to raise.

        Args:
            root: what the model returned, or computed from it, a loss for example.
            forward: the forward pass that it comes from, which lives as long as the graph of ``root`` from now on.
        """
        if not forward.has_cuts and not forward.of.stand_ins:
            return
        for tensor in roots_of(root):
            tensor.register_hook(lambda _: self._check(forward))  # type: ignore[no-untyped-call]
            forward.of.expect(forward)

    def _check(self, forward: Forward) -> None:
        """A backward pass has begun.

        Raises:
            RuntimeError: it makes a graph of itself, goes through a pass that was dropped or through several passes,
                or parameters get gradients from elsewhere that they did not get in the first step.
        """
        stand_ins = forward.of.stand_ins
        if not self._anchor.is_whole() and not any(one.run_now() for one in stand_ins.values()):
            return  # the anchor hangs on cut nodes, of which a forward pass may have none
        calls = forward.running_cuts()
        if calls and torch.is_grad_enabled():
            raise RuntimeError(f"{DOUBLE_BACKWARD}. No gradient has been set")
        self._check_pass(forward.of)
        cut = {call.layer for call in calls}
        torn = {call.layer for call in calls if any(will_execute(leaf) for leaf in call.leaves)}
        torn |= {la for la, one in stand_ins.items() if one.is_torn() or (la in cut and one.run_now())}
        for layer in torn:
            layer.why_in_order = USED_ELSEWHERE
        if torn:
            names = ", ".join(repr(layer.name) for layer in torn)
            raise RuntimeError(
                f"the parameters of {names} get gradients from outside of the layer that they did not get in the first "
                "step, so out-of-order backprop would add them up in two goes. No gradient has been set: run this step "
                "again, now in order; or use k=0, or a k below this layer"
            )
        if not keeps_graph():
            forward.is_over = True

    def _check_pass(self, one: WaitingPass) -> None:
        if one.is_dropped:
            raise RuntimeError(f"a backward pass comes through the pass {one.key!r}, which was dropped before")
        backward = current_backward()
        if self._last is not None and self._last[0] == backward and self._last[1] is not one:
            raise RuntimeError(
                f"one backward pass goes through the passes {self._last[1].key!r} and {one.key!r}, whose gradients it "
                "would add up in two goes: run one backward pass for each, or give both forward passes the same key"
            )
        self._last = (backward, one)


def roots_of(output: Any) -> list[Tensor]:
    """What a model returns and computed; a hook on a leaf would stay."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
