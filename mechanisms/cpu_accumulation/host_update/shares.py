"""Who updates what."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

__all__ = ["Shares"]


class Shares:
    """Gives whole parameters to ranks: the largest first, each to the rank that has the fewest bytes so far.

    All ranks ask for the same parameters in the same order, so that all give them out alike. What is given out stays
    where it is, as its state does; parameters that come later go to who has the least then.

    Args:
        ranks: how many.
        divisible: those that can be given out: their gradients are the same on all ranks. Others each rank updates.
    """

    def __init__(self, ranks: int, divisible: Collection[Tensor]) -> None:
        self.bytes = [0] * ranks
        self._divisible = frozenset(divisible)
        self._owners: dict[Tensor, int] = {}

    def give_out(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those that nobody had so far; returns them."""
        new = [one for one in parameters if one not in self._owners and one in self._divisible]
        for parameter in sorted(new, key=lambda one: -one.nbytes):
            rank = min(range(len(self.bytes)), key=self.bytes.__getitem__)
            self._owners[parameter] = rank
            self.bytes[rank] += parameter.nbytes
        return new

    def owner(self, parameter: Tensor) -> int | None:
        """The rank that updates it; None: all do."""
        return self._owners.get(parameter)

    def may_divide(self, parameter: Tensor) -> bool:
        """Whether its gradient is the same on all ranks."""
        return parameter in self._divisible
