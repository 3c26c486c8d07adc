"""The weight gradients that wait, by pass: what belongs to one micro-batch waits and ends apart from the others."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from retime.foundations.torch_private.engine import (
    graph_task_id,
    keeps_graph,
    next_sequence_number,
    tree_leaves,
    will_execute,
)
from retime.foundations.torch_private.tensors import without_subclass_functions
from retime.foundations.weight_gradients.cut import (
    DOUBLE_BACKWARD,
    Anchor,
    BufferedGradients,
    Call,
    Layer,
    Span,
    WeightGradient,
    read_elsewhere,
    run_weight_gradients,
    trained,
)

UNNAMED: Hashable = None
"""The pass of every forward pass that its owner gave no key."""


class Forward:
    """One forward pass of the model, for as long as its graph lives, which holds it through the guard's hooks."""

    def __init__(self, of: "WaitingPass") -> None:
        self.of = of
        self.is_over = False
        """Whether a backward pass has begun that does not keep the graph."""
        self.cuts: list[weakref.ref[Node]] = []
        """Of the layers that were cut out of the graph."""

    def running_cuts(self) -> list[Call]:
        """The calls whose cut nodes the running backward pass comes to."""
        nodes = [node for reference in self.cuts if (node := reference()) is not None]
        return [node.call for node in nodes if will_execute(node)]  # type: ignore[attr-defined]


class WaitingPass:
    """The weight gradients of one pass that wait: between the backward passes through it and :meth:`finish_layer`.

    Gradients of one backward pass are added up before they reach a parameter, and its hooks fire once, as in autograd;
    two backward passes reach it one after the other.

    Args:
        key: what the owner calls this pass.
        on_backward: called with this, inside of each backward pass, when its first weight gradient begins to wait.
    """

    def __init__(self, key: Hashable, on_backward: "Callable[[WaitingPass], None]") -> None:
        self.key = key
        self.buffered: dict[Layer, BufferedGradients] = {}
        self.is_dropped = False
        self._on_backward = on_backward
        self._noted: int | None = None
        """The backward pass that the owner was told of last."""
        self._keeps_graph = False
        """Whether that keeps its graph, for another."""
        self._waiting: dict[Layer, dict[int, list[WeightGradient]]] = {}
        """Weight gradients that wait, by layer and by autograd's number of the backward pass."""
        self.forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        """Forward passes that a backward pass may come through."""

    def note(self, waiting: WeightGradient) -> None:
        """An output gradient is done; its weight gradient waits from now on."""
        self._note_backward()
        self._waiting.setdefault(waiting.layer, {}).setdefault(graph_task_id(), []).append(waiting)

    def buffered_of(self, layer: Layer) -> BufferedGradients:
        """Stand-ins for this layer's parameters; the same in all forward passes of this pass."""
        if layer not in self.buffered:
            self.buffered[layer] = BufferedGradients(layer, self._note_backward)
        return self.buffered[layer]

    def _note_backward(self) -> None:
        backward = graph_task_id()
        if backward != self._noted:
            self._noted = backward
            self._keeps_graph = bool(keeps_graph())
            self._on_backward(self)

    @property
    def is_in_flight(self) -> bool:
        """Return whether a backward pass can still come: some graph lives, and none has gone through it for good."""
        return self._keeps_graph or any(not forward.is_over for forward in self.forwards)

    def waiting(self) -> set[Layer]:
        """The layers of which a weight gradient waits."""
        return set(self._waiting) | {layer for layer, one in self.buffered.items() if one.arrived}

    def finish_layer(self, layer: Layer) -> tuple[int, int]:
        """Compute, or hand on, what waits of one layer, backward pass by backward pass; return how many of either."""
        computed = self._waiting.pop(layer, {})
        buffered = self.buffered.get(layer)
        arrived = {} if buffered is None else buffered.arrived
        deferred = handed = 0
        for backward in sorted({*computed, *arrived}):
            if backward in computed:
                deferred += run_weight_gradients(computed[backward])
            if buffered is not None:
                handed += buffered.hand_on(backward)
        if buffered is not None and not self.is_in_flight:
            del self.buffered[layer]
            buffered.release()
        return deferred, handed

    def finish_together(self, layers: list[Layer]) -> tuple[int, int]:
        """Compute, or hand on, what waits of all these layers, in one call of autograd for each backward pass."""
        by_backward: dict[int, list[WeightGradient]] = {}
        deferred = 0
        for layer in layers:
            for backward, waiting in self._waiting.pop(layer, {}).items():
                by_backward.setdefault(backward, []).extend(waiting)
                deferred += bool(trained(waiting))
        for backward in sorted(by_backward):
            run_weight_gradients(by_backward[backward])
        return deferred, sum(self.finish_layer(layer)[1] for layer in layers if layer in self.buffered)

    def forget_waiting(self, *, but: int | None = None) -> None:
        """Drop what waits of backward passes that failed, or of all but one."""
        waiting: list[dict[int, Any]] = [*self._waiting.values(), *(one.arrived for one in self.buffered.values())]
        for backwards in waiting:
            for backward in [one for one in backwards if one != but]:
                del backwards[backward]
        self._waiting = {layer: backwards for layer, backwards in self._waiting.items() if backwards}

    def forget(self) -> None:
        """Drop all that waits, and what no forward pass in flight needs."""
        self.forget_waiting()
        for buffered in self.buffered.values():
            buffered.take_out()
        if not self.is_in_flight:
            self.buffered.clear()

    def drop(self) -> None:
        """Forget everything: a backward pass that comes all the same is refused."""
        self.is_dropped, self._keeps_graph = True, False
        self.forget_waiting()
        for buffered in self.buffered.values():
            buffered.take_out()
            buffered.release()
        self.buffered.clear()


class PassesInFlight:
    """The passes of one model whose weight gradients wait, or will: each has a key, and ends or is dropped by itself.

    Args:
        on_backward: see :class:`WaitingPass`.
        layers: whose weight gradients wait, until ``chosen`` is set.
        order: the layers in forward order, as soon as this is known.

    Attributes:
        splits: whether forward passes are split. May be set between two of them, as ``chosen``.
        chosen: the layers whose weight gradients wait.
        in_flight: passes with a key that neither ended nor were dropped, in the order in which they began.
        deferred_gradients: how many of one layer's weight gradients, one a backward pass, were computed when they were
            asked for.
        buffered_gradients: how many were computed together with the output gradient, and handed on then.
    """

    def __init__(self, on_backward: Callable[[WaitingPass], None], layers: Iterable[Layer], order: list[Layer]) -> None:
        self._on_backward, self._order = on_backward, order
        self.deferred_gradients = self.buffered_gradients = 0
        self.splits = True
        self.chosen = set(layers)
        self.in_flight: dict[Hashable, WaitingPass] = {}
        self.current = self.unnamed = WaitingPass(UNNAMED, on_backward)
        """What forward passes belong to from now on."""

    @contextmanager
    def begin(self, key: Hashable, *, waits: bool = True) -> Iterator[None]:
        """Forward passes inside of this context belong to the pass ``key``.

        Args:
            key: of the pass.
            waits: False: its weight gradients are computed in its backward pass, as without this.

        Raises:
            ValueError: the key is None.
        """
        if key is UNNAMED:
            raise ValueError("a pass needs a key that is not None, the number of its micro-batch for example")
        if key not in self.in_flight:
            self.in_flight[key] = WaitingPass(key, self._on_backward)
        before = self.current, self.splits
        self.current, self.splits = self.in_flight[key], waits
        try:
            yield
        finally:
            self.current, self.splits = before

    def of(self, key: Hashable) -> WaitingPass:
        """The pass of this key.

        Raises:
            ValueError: there is none: it never began, has ended, or was dropped.
        """
        if key is UNNAMED:
            return self.unnamed
        if key not in self.in_flight:
            raise ValueError(f"no pass {key!r} is in flight; in flight are: {list(self.in_flight)}")
        return self.in_flight[key]

    def finish(self, key: Hashable, layers: Iterable[Layer] | None = None) -> None:
        """Compute the weight gradients that wait in a pass, in forward order, or in the order of ``layers``.

        Hooks on parameters fire. The pass is gone then, unless a backward pass through it can still come or something
        of it waits.

        Raises:
            ValueError: no such pass is in flight.
        """
        one = self.of(key)
        for layer in self._order if layers is None else layers:
            try:
                self._count(*one.finish_layer(layer))
            except RuntimeError as error:
                if "marked" in str(error) and "ready" in str(error):
                    error.add_note(f"retime: the parameters of {layer.name!r} are read by other code too: use k=0")
                raise
        self._settle(one)

    def finish_together(self, key: Hashable) -> None:
        """Compute all weight gradients that wait in a pass, in one call of autograd: faster, in an order of its own.

        Raises:
            ValueError: no such pass is in flight.
        """
        one = self.of(key)
        self._count(*one.finish_together(self._order))
        self._settle(one)

    def _count(self, deferred: int, buffered: int) -> None:
        self.deferred_gradients += deferred
        self.buffered_gradients += buffered

    def _settle(self, one: WaitingPass) -> None:
        """A pass of which nothing waits any more is gone, unless a backward pass can still come."""
        if one.key is not UNNAMED and not one.is_in_flight and not one.waiting():
            self.in_flight.pop(one.key, None)

    def drop(self, key: Hashable) -> None:
        """Compute nothing more of a pass that has a key; a backward pass that comes through it all the same raises.

        Raises:
            ValueError: no such pass is in flight.
        """
        one = self.of(key)
        del self.in_flight[key]
        one.drop()


# Backward passes that would add gradients up in another order are refused before they set any gradient.

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
        if not forward.cuts and not forward.of.buffered:
            return
        for tensor in roots_of(root):
            tensor.register_hook(lambda _: self._check(forward))  # type: ignore[no-untyped-call]
            forward.of.forwards.add(forward)

    def _check(self, forward: Forward) -> None:
        """A backward pass has begun.

        Raises:
            RuntimeError: it makes a graph of itself, goes through a pass that was dropped or through several passes,
                or parameters get gradients from elsewhere that they did not get in the first step.
        """
        buffered = forward.of.buffered
        if not self._anchor.is_whole() and not any(one.run_now() for one in buffered.values()):
            return  # the anchor hangs on cut nodes, of which a forward pass may have none
        calls = forward.running_cuts()
        if calls and torch.is_grad_enabled():
            raise RuntimeError(f"{DOUBLE_BACKWARD}. No gradient has been set")
        self._check_pass(forward.of)
        cut = {call.layer for call in calls}
        torn = {call.layer for call in calls if any(will_execute(leaf) for leaf in call.leaves)}
        torn |= {la for la, one in buffered.items() if one.is_torn() or (la in cut and one.run_now())}
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
        backward = graph_task_id()
        if self._last is not None and self._last[0] == backward and self._last[1] is not one:
            raise RuntimeError(
                f"one backward pass goes through the passes {self._last[1].key!r} and {one.key!r}, whose gradients it "
                "would add up in two goes: run one backward pass for each, or give both forward passes the same key"
            )
        self._last = (backward, one)


def roots_of(output: Any) -> list[Tensor]:
    """Tensors that a model returns and computed; a hook on a leaf would stay."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]


# What the first pass shows: forward order, which parameters are read elsewhere too, and how much each layer keeps.
#
# Its backward pass runs as ever. Passes after something has been frozen or thawed are looked at in the same way.

NOT_CALLED = "it did not run in the first step"


class FirstPass:
    """Watches the layers of a model until one graph has been seen, and looks again where it may differ.

    Args:
        model: whose parameters may be frozen and thawed.
        layers: of the model; those that turn out to be unable to wait are marked.
        on_order: called with those that ran, in forward order, when the watching ends.
    """

    def __init__(self, model: nn.Module, layers: list[Layer], on_order: Callable[[list[Layer]], None]) -> None:
        self._layers = layers
        self._on_order = on_order
        self._parameters: list[Tensor] = list(model.parameters())
        self.is_watching = True
        """Whether the first backward pass is still to come."""
        self.is_looking = False
        """Whether the forward pass under way is only looked at: what is frozen in it was not so before."""
        self.order: list[Layer] = []
        """The layers that ran, in forward order."""
        self.input_bytes: dict[Layer, int] = {}
        """What the forward pass keeps for a layer's weight gradient."""
        self.waiting_bytes: dict[Layer, int] = {}
        """What must stay besides while the weight gradient waits: output gradients, or the finished gradient."""
        self._spans: list[Span] = []
        self._state: tuple[bool, ...] = ()
        self._seen: set[tuple[bool, ...]] = set()

    @property
    def is_on(self) -> bool:
        """Return whether the forward pass under way runs as ever."""
        return self.is_watching or self.is_looking

    def begin(self, args: Any, kwargs: Any, *, any_waits: bool) -> None:
        """The model is about to run; ``any_waits`` says whether any layer's weight gradient would wait."""
        with without_subclass_functions():  # parameters may wait for updates, and this is no read of them
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._state = tuple(tensor.requires_grad for tensor in (*self._parameters, *given))
        if not self.is_watching:
            self._spans.clear()
            self.is_looking = any_waits and self._state not in self._seen

    def note_layer(self, layer: Layer) -> None:
        """A layer is about to run."""
        if self.is_watching and layer not in self.order:
            self.order.append(layer)

    def note_call(self, call: Call, results: list[Tensor]) -> None:
        """A layer has run; ``results`` are its outputs that need a gradient."""
        outputs = frozenset(edge.node for edge in call.outputs)
        self._spans.append(Span(call.since, next_sequence_number(), outputs, frozenset(call.layer.parameters)))
        if self.is_watching:
            layer = call.layer
            waits = results if layer.why_buffered is None else layer.trainable()
            for sizes, tensors in ((self.input_bytes, call.originals), (self.waiting_bytes, waits)):
                sizes[layer] = sizes.get(layer, 0) + sum(t.numel() * t.element_size() for t in tensors)

    def end(self, output: Any) -> None:
        """The model has run."""
        if self.is_looking:
            self._look(roots_of(output))
        if self.is_on:
            self._seen.add(self._state)
        self.is_looking = False

    def finish(self, root: Any) -> None:
        """Look at the graph under ``root`` before its first backward pass; that ends the watching."""
        roots = roots_of(root)
        if not self.is_watching or not self._spans or not roots:
            return
        called = set(self.order)
        for layer in self._layers:
            if layer.why_in_order is None and layer not in called:
                layer.why_in_order = NOT_CALLED
        self._look(roots)
        self._on_order(self.order)
        self.is_watching = False

    def _look(self, roots: list[Tensor]) -> None:
        outside = read_elsewhere(roots, self._spans)
        for layer in self._layers:
            if layer.why_in_order is None and any(p in outside for p in layer.parameters):
                layer.why_in_order = USED_ELSEWHERE
        self._spans.clear()

    def forget(self) -> None:
        """Begin anew, if no graph has been seen yet."""
        if self.is_watching:
            self._spans.clear()
            self.order.clear()
            self.input_bytes.clear()
            self.waiting_bytes.clear()
