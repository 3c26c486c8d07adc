"""Hooks at the layers of a model, where a step stops, or goes past what lies on another rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from torch import nn

__all__ = ["LayerGates", "Visitor"]


class Visitor(Protocol):
    """Whoever is asked at each layer."""

    def before(self, layer: int, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A layer is called; other arguments for it, or None."""

    def is_here(self, layer: int) -> bool:
        """Whether it runs on this rank."""

    def instead(self, layer: int, args: Any, kwargs: Any) -> Any:
        """What a layer returns that does not run here."""

    def after(self, layer: int, output: Any) -> Any:
        """What a layer returns that has run here."""


class LayerGates:
    """Lets a visitor decide what the layers of a model do; without one they do what they ever did.

    Args:
        layers: in forward order.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.visitor: Visitor | None = None
        self.around: Callable[[nn.Module], AbstractContextManager[None]] | None = None
        """In which a layer runs, for those that have their values only then."""
        self._layers = list(layers)
        self._handles = [
            layer.register_forward_pre_hook(_Before(self, number), prepend=True, with_kwargs=True)
            for number, layer in enumerate(layers)
        ]
        for number, layer in enumerate(layers):
            vars(layer)["forward"] = _Gate(self, number, layer)

    def remove(self) -> None:
        """Give the layers their own ``forward`` back."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            gate = vars(layer).get("forward")
            if isinstance(gate, _Gate):
                gate.take_out()


class _Before:
    """A hook in front of a layer; in a copy of the model, which is a plain model, it does nothing."""

    def __init__(self, gates: LayerGates | None, number: int) -> None:
        self._gates, self._number = gates, number

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        visitor = None if self._gates is None else self._gates.visitor
        return None if visitor is None else visitor.before(self._number, args, kwargs)

    def __reduce__(self) -> Any:
        return _Before, (None, self._number)


class _Gate:
    """Stands in the place of a layer's ``forward``."""

    def __init__(self, gates: LayerGates | None, number: int, layer: nn.Module, own: Any = None) -> None:
        self._gates, self._number, self._layer = gates, number, layer
        self._own = vars(layer).get("forward") if own is None else own

    def take_out(self) -> None:
        if self._own is None:
            del vars(self._layer)["forward"]
        else:
            vars(self._layer)["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        visitor = None if self._gates is None else self._gates.visitor
        if visitor is None:
            return self._forward(*args, **kwargs)
        if not visitor.is_here(self._number):
            return visitor.instead(self._number, args, kwargs)
        return visitor.after(self._number, self._forward(*args, **kwargs))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._own or partial(type(self._layer).forward, self._layer)
        if self._gates is None or self._gates.around is None:
            return forward(*args, **kwargs)
        with self._gates.around(self._layer):
            return forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _Gate, (None, self._number, self._layer, self._own)
