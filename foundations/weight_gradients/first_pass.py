"""What the first pass shows: forward order, which parameters are read elsewhere too, and how much each layer keeps.

Its backward pass runs as ever. Passes after something has been frozen or thawed are looked at in the same way.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from retime.foundations.torch_private import next_sequence_number, tree_leaves, without_subclass_functions
from retime.foundations.weight_gradients.cut import Call
from retime.foundations.weight_gradients.graph import Span, read_elsewhere
from retime.foundations.weight_gradients.guard import USED_ELSEWHERE, roots_of
from retime.foundations.weight_gradients.layers import Layer

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
        """Whether the forward pass under way runs as ever."""
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

    def note_call(self, call: Call, found: list[Tensor]) -> None:
        """A layer has run; ``found`` are its outputs that need a gradient."""
        outputs = frozenset(edge.node for edge in call.outputs)
        self._spans.append(Span(call.since, next_sequence_number(), outputs, frozenset(call.layer.parameters)))
        if self.is_watching:
            layer = call.layer
            waits = found if layer.why_buffered is None else layer.trainable()
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
