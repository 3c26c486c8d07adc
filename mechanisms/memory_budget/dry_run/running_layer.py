"""Which layer of a module runs, in its forward pass and in its backward pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from retime.foundations.torch_private import current_node, next_sequence_number, sequence_number
from retime.schedules.budget import Phase

# Nodes that accumulate into a leaf are all numbered 2**64 - 1; they run right after the node that they serve.
_LEAF_SEQUENCE = 2**63


class RunningLayer:
    """Layers by name, innermost first.

    In a backward pass a layer is told by the number of autograd's node, which counts up while the graph is made.

    Args:
        module: whose layers; its hooks are taken off by :meth:`watch`'s end.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._root = type(module).__name__
        self._names: Mapping[int, str] = {id(child): name for name, child in module.named_modules()}
        self._stack: list[str] = []
        self._marks: tuple[list[int], list[str]] = ([], [])  # sequence numbers at which the layer changed, and to what
        self._last_backward_layer = self._root
        self._phase = Phase.FORWARD

    def begin(self, phase: Phase) -> None:
        """This part of the step runs from now on."""
        self._phase = phase

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow which layer runs, by hooks on the module's children."""
        handles = []
        for child in self._module.modules():
            if isinstance(child, torch.jit.ScriptModule):  # it takes no hooks: what it does counts for its parent
                continue
            handles.append(child.register_forward_pre_hook(self._enter_layer))
            handles.append(child.register_forward_hook(self._leave_layer, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_layer(self, module: nn.Module, args: object) -> None:
        self._stack.append(self._names.get(id(module)) or self._root)
        self._mark()

    def _leave_layer(self, module: nn.Module, args: object, output: object) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Nodes of the graph are numbered as they are made: remember from which number on this layer makes them."""
        if self._phase is Phase.FORWARD:
            numbers, layers = self._marks
            numbers.append(next_sequence_number())
            layers.append(self._stack[-1] if self._stack else self._root)

    def name(self) -> str:
        """The name of the layer that runs, or whose backward pass does."""
        if self._stack or self._phase is not Phase.BACKWARD:
            return self._stack[-1] if self._stack else self._root
        node = current_node()
        numbers, layers = self._marks
        if node is not None and numbers:
            sequence = sequence_number(node)
            if sequence < _LEAF_SEQUENCE:
                place = bisect_right(numbers, sequence) - 1
                self._last_backward_layer = layers[place] if place >= 0 else self._root
        return self._last_backward_layer
