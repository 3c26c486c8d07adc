"""What rounds of a measurement come to: median and quartiles, of values or of ratios inside of each round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over rounds, with the rounds themselves; the unit is the owner's."""

    median: float
    low: float
    high: float
    rounds: list[float] = field(default_factory=list)

    @property
    def reach(self) -> tuple[float, float]:
        """Between which numbers it lies: the quartiles; of fewer than five rounds, which say little, all of them."""
        return (min(self.rounds), max(self.rounds)) if 0 < len(self.rounds) < 5 else (self.low, self.high)


def spread(values: Sequence[float]) -> Spread:
    """Median, lower and upper quartile of `values`, one value a round."""
    if not values:
        raise ValueError("no rounds were measured: set rounds to at least 1")
    low, median, high = np.percentile(np.asarray(values, dtype=float), [25, 50, 75])
    return Spread(float(median), float(low), float(high), [float(value) for value in values])


def speedup(reference: Sequence[float], other: Sequence[float]) -> Spread:
    """How many times faster `other` is than `reference`: their ratio in each round, then its spread."""
    return spread([before / after for before, after in zip(reference, other, strict=True)])
