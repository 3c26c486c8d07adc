"""What is known of a tensor's values while the flow of a step is followed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from retime.foundations.parts import Count
from retime.mechanisms.memory_budget.separability.flow_counts import Counted

__all__ = ["Divisor", "Label", "either"]


@dataclass(frozen=True)
class Divisor:
    """What a loss is divided by, or what chooses what it is a mean over: it comes from these places of the batch.

    Attributes:
        ratio: its value in the part over that in the whole; NaN where it is not known.
        ignored: it counts class numbers that are not this one.
        count: what it counts there, whatever the values are; None where it is something else.
        some: the class numbers are some of those entries only.
    """

    places: frozenset[str]
    ratio: float = math.nan
    ignored: int | None = None
    count: Count | None = None
    some: bool = False


@dataclass(frozen=True)
class Label:
    """What is known of a storage's values.

    Attributes:
        sampled: they depend on samples.
        computed: on more than the batch: on parameters, on what modules hold, on random numbers.
        places: of the batch.
        grows: there are more of them where there are more samples.
        rows: how many there are depends on these values.
        cut: they are sums over such rows.
        classes: they are no less than 0.
        sums, means: they contain sums, or means, over samples that nothing is divided by.
        constant: they contain what does not depend on samples, beside what was taken over them.
        scaled: they are divided by how many samples there are, one by one.
        reason: why what follows from them may not add up from parts; empty where it does.
        weights: the reason is a count that nobody can know before; someone who gives it can rule it out.
        divisors: that they contain.
        counted: what they count in the batch.
    """

    sampled: bool = False
    computed: bool = False
    places: frozenset[str] = frozenset()
    grows: bool = False
    rows: Label | None = None
    cut: Label | None = None
    classes: bool = False
    sums: bool = False
    means: bool = False
    reason: str = ""
    weights: bool = False
    divisors: frozenset[Divisor] = frozenset()
    counted: Counted | None = None
    constant: bool = False
    scaled: bool = False

    def flagged(self, reason: str, weights: bool = False) -> Label:
        """The first reason stays, but one that somebody can rule out makes way for one that nobody can."""
        if self.reason and (weights or not self.weights):
            return self
        return replace(self, reason=reason, weights=weights)

    def joined(self, other: Label) -> Label:
        """Of values that follow from both."""
        worse = other if other.reason and (not self.reason or (self.weights and not other.weights)) else self
        return Label(
            self.sampled or other.sampled,
            self.computed or other.computed,
            self.places | other.places,
            self.grows or other.grows,
            either(self.rows, other.rows),
            either(self.cut, other.cut),
            self.classes and other.classes,
            self.sums or other.sums,
            self.means or other.means,
            worse.reason,
            worse.weights,
            self.divisors | other.divisors,
            self.counted if self.counted == other.counted else None,
            self.constant or other.constant,
            self.scaled or other.scaled,
        )

    def divided(self, divisor: Divisor) -> Label:
        """The same, divided by more."""
        return replace(self, sums=False, means=False, divisors=self.divisors | {divisor})

    def shared(self, growth: float, grown: bool) -> Label:
        """Multiplied by a number that is so many times as large where there are more samples.

        Args:
            growth: 1 where it is divided by how many samples there are, -1 where it is multiplied by that.
            grown: they are the values of samples.
        """
        if grown and growth == 1 and not self.scaled:
            return replace(self, scaled=True)
        if not grown and not self.constant and not self.divisors:
            if growth == 1 and self.sums and not self.means:
                return replace(self, sums=False, means=True)
            if growth == -1 and self.means and not self.sums:
                return replace(self, sums=True, means=False)
        return self.flagged("it is multiplied or divided by a number that follows from how many samples there are")

    def by_chosen(self, rows: Label, ratio: float) -> Label:
        """A mean over rows that were chosen so, of which a part has so much of the whole."""
        if rows.computed:
            return self.flagged("the loss is a mean over samples that are chosen by computed values", True)
        return self.divided(Divisor(rows.places, ratio, count=rows.counted.exactly if rows.counted else None))

    def settled(self, ratio: float = math.nan) -> Label:
        """After a mean over its rows."""
        return self if self.rows is None else replace(self.by_chosen(self.rows, ratio), rows=None)


def either(one: Label | None, two: Label | None) -> Label | None:
    """Both, where there are two."""
    return one if two is None else two if one is None else one.joined(two)
