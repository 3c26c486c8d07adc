"""How long the tasks of a pipeline really take: seen in its first steps, for an order that fits them better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from retime.mechanisms.pipeline.stage import Span

__all__ = ["MeasuredTimes"]

_FIRST, _LAST = 2, 4
"""The steps that count, from 1: in the first one libraries and memory are cold."""


class MeasuredTimes:
    """Collects the tasks of a rank's first steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._took_ms: dict[tuple[int, str], list[float]] = {}

    def note(self, spans: Iterable[Span]) -> bool:
        """A step has run; whether it was the last that counts."""
        self._steps += 1
        if _FIRST <= self._steps <= _LAST:
            for span in spans:
                self._took_ms.setdefault((span.stage, span.kind), []).append(1000 * (span.end_s - span.start_s))
        return self._steps == _LAST

    def by_stage(self, weight_share: Mapping[int, float]) -> dict[int, tuple[float, float, float]]:
        """Milliseconds of F, O and W of each stage, the medians.

        Args:
            weight_share: of W in O and W together, by stage: for those that ran both in one pass.
        """
        found = {}
        for stage in {stage for stage, _ in self._took_ms}:
            took = {kind: median(values) for (one, kind), values in self._took_ms.items() if one == stage}
            if "O" not in took or "W" not in took:
                took["W"] = weight_share[stage] * took["B"]
                took["O"] = took["B"] - took["W"]
            found[stage] = took["F"], took["O"], took["W"]
        return found
