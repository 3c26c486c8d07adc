"""The weight gradients that wait, by pass: what belongs to one micro-batch waits and ends apart from the others."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.autograd.graph import Node

from retime.foundations.torch_private import graph_task_id, keeps_graph, will_execute
from retime.foundations.weight_gradients.cut import Call, WeightGradient, run_weight_gradients, trained
from retime.foundations.weight_gradients.layers import Layer
from retime.foundations.weight_gradients.stand_ins import StandIns

UNNAMED: Hashable = None
"""The pass of every forward pass that its owner gave no key."""


def current_backward() -> int:
    """Autograd's number of the backward pass that is running; later ones have higher numbers."""
    return int(graph_task_id())


class Forward:
    """One forward pass of the model, for as long as its graph lives, which holds it through the guard's hooks."""

    def __init__(self, of: "WaitingPass") -> None:
        self.of = of
        self.is_over = False
        """Whether a backward pass has begun that does not keep the graph."""
        self._cuts: list[weakref.ref[Node]] = []

    def add(self, node: Node) -> None:
        """One more layer was cut out of the graph."""
        self._cuts.append(weakref.ref(node))

    @property
    def has_cuts(self) -> bool:
        """Whether any layer was cut out of the graph."""
        return bool(self._cuts)

    def running_cuts(self) -> list[Call]:
        """The calls whose cut nodes the running backward pass comes to."""
        nodes = [node for reference in self._cuts if (node := reference()) is not None]
        return [node.call for node in nodes if will_execute(node)]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Finished:
    """How many of one layer's weight gradients, one a backward pass, have reached its parameters."""

    deferred: int = 0
    """Computed just now."""
    buffered: int = 0
    """Computed in the backward pass, together with the output gradient."""


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
        self.stand_ins: dict[Layer, StandIns] = {}
        self.is_dropped = False
        self._on_backward = on_backward
        self._noted: int | None = None
        """The backward pass that the owner was told of last."""
        self._keeps_graph = False
        """Whether that keeps its graph, for another."""
        self._waiting: dict[Layer, dict[int, list[WeightGradient]]] = {}
        """By layer, and by autograd's number of the backward pass."""
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()

    def note(self, waiting: WeightGradient) -> None:
        """An output gradient is done; its weight gradient waits from now on."""
        self._note_backward()
        self._waiting.setdefault(waiting.layer, {}).setdefault(current_backward(), []).append(waiting)

    def stand_ins_of(self, layer: Layer) -> StandIns:
        """What stands for this layer's parameters; the same in all forward passes of this pass."""
        if layer not in self.stand_ins:
            self.stand_ins[layer] = StandIns(layer, self._note_backward)
        return self.stand_ins[layer]

    def _note_backward(self) -> None:
        backward = current_backward()
        if backward != self._noted:
            self._noted = backward
            self._keeps_graph = bool(keeps_graph())
            self._on_backward(self)

    def expect(self, forward: Forward) -> None:
        """A backward pass may come through this forward pass."""
        self._forwards.add(forward)

    @property
    def is_in_flight(self) -> bool:
        """Whether a backward pass can still come: some graph lives, and none has gone through it for good."""
        return self._keeps_graph or any(not forward.is_over for forward in self._forwards)

    def waiting(self) -> set[Layer]:
        """The layers of which a weight gradient waits."""
        return set(self._waiting) | {layer for layer, one in self.stand_ins.items() if one.backwards}

    def finish_layer(self, layer: Layer) -> Finished:
        """Compute, or hand on, what waits of one layer, backward pass by backward pass."""
        computed = self._waiting.pop(layer, {})
        stand_ins = self.stand_ins.get(layer)
        held = stand_ins.backwards if stand_ins is not None else []
        deferred = handed = 0
        for backward in sorted({*computed, *held}):
            if backward in computed:
                deferred += run_weight_gradients(computed[backward])
            if stand_ins is not None:
                handed += stand_ins.hand_on(backward)
        if stand_ins is not None and not self.is_in_flight:
            del self.stand_ins[layer]
            stand_ins.release()
        return Finished(deferred, handed)

    def finish_together(self, layers: Iterable[Layer]) -> Finished:
        """Compute, or hand on, what waits of all these layers, in one call of autograd for each backward pass.

        Faster than layer by layer; which gradient is there first is autograd's choice.
        """
        by_backward: dict[int, list[WeightGradient]] = {}
        layers, deferred = list(layers), 0
        for layer in layers:
            for backward, waiting in self._waiting.pop(layer, {}).items():
                by_backward.setdefault(backward, []).extend(waiting)
                deferred += bool(trained(waiting))
        for backward in sorted(by_backward):
            run_weight_gradients(by_backward[backward])
        handed = [self.finish_layer(layer) for layer in layers if layer in self.stand_ins]
        return Finished(deferred, sum(one.buffered for one in handed))

    def forget_waiting(self, *, but: int | None = None) -> None:
        """Drop what waits of backward passes that failed, or of all but one."""
        for layer, backwards in list(self._waiting.items()):
            for backward in [one for one in backwards if one != but]:
                del backwards[backward]
            if not backwards:
                del self._waiting[layer]
        for stand_ins in self.stand_ins.values():
            for backward in [one for one in stand_ins.backwards if one != but]:
                stand_ins.drop(backward)

    def forget(self) -> None:
        """Drop all that waits, and what no forward pass in flight needs."""
        self.forget_waiting()
        for stand_ins in self.stand_ins.values():
            stand_ins.take_out()
        if not self.is_in_flight:
            self.stand_ins.clear()

    def drop(self) -> None:
        """Forget everything: a backward pass that comes all the same is refused."""
        self.is_dropped, self._keeps_graph = True, False
        self.forget_waiting()
        for stand_ins in self.stand_ins.values():
            stand_ins.take_out()
            stand_ins.release()
        self.stand_ins.clear()


class PassesInFlight:
    """The passes of one model whose weight gradients wait, or will: each has a key, and ends or is dropped by itself.

    Args:
        on_backward: see :class:`WaitingPass`.
    """

    def __init__(self, on_backward: Callable[[WaitingPass], None]) -> None:
        self._on_backward = on_backward
        self._passes: dict[Hashable, WaitingPass] = {}
        self.current = self.unnamed = WaitingPass(UNNAMED, on_backward)
        """What forward passes belong to from now on."""

    @contextmanager
    def begin(self, key: Hashable) -> Iterator[None]:
        """Forward passes in here belong to the pass ``key``.

        Raises:
            ValueError: the key is None.
        """
        if key is UNNAMED:
            raise ValueError("a pass needs a key that is not None, the number of its micro-batch for example")
        if key not in self._passes:
            self._passes[key] = WaitingPass(key, self._on_backward)
        before, self.current = self.current, self._passes[key]
        try:
            yield
        finally:
            self.current = before

    def of(self, key: Hashable) -> WaitingPass:
        """The pass of this key.

        Raises:
            ValueError: there is none: it never began, has ended, or was dropped.
        """
        if key is UNNAMED:
            return self.unnamed
        if key not in self._passes:
            raise ValueError(f"no pass {key!r} is in flight; in flight are: {list(self._passes)}")
        return self._passes[key]

    def keys(self) -> list[Hashable]:
        """Of the passes in flight, in the order in which they began."""
        return list(self._passes)

    def settle(self, one: WaitingPass) -> None:
        """A pass of which nothing waits any more is gone, unless a backward pass can still come."""
        if one.key is not UNNAMED and not one.is_in_flight and not one.waiting():
            self._passes.pop(one.key, None)

    def drop(self, key: Hashable) -> None:
        """Compute nothing more of one pass.

        Raises:
            ValueError: there is no such pass.
        """
        one = self.of(key)
        if key is UNNAMED:
            one.forget()
        else:
            del self._passes[key]
            one.drop()

    def drop_all(self) -> None:
        """Compute nothing more of any pass."""
        for key in [UNNAMED, *self._passes]:
            self.drop(key)
