"""What the tasks of a pipeline cost: times a stage, sizes of what stays alive, and times between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from retime.schedules.pipeline.placement import Placement
from retime.schedules.tasks import Kind, Task


@dataclass(frozen=True)
class StageCosts:
    """Times and sizes of the stages for one micro-batch, in forward order.

    Args:
        forward_ms: time of F.
        output_gradient_ms: time of O. That of stage 1 counts only in schedules that list O1.
        weight_gradient_ms: time of W.
        activation_bytes: what F keeps alive until W is done; 1 a stage when left out, so that bytes read as stages.

    Raises:
        ValueError: when the four have different lengths, or an entry is negative or not finite.
    """

    forward_ms: tuple[float, ...]
    output_gradient_ms: tuple[float, ...]
    weight_gradient_ms: tuple[float, ...]
    activation_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_ms)
        if not stages:
            raise ValueError("forward_ms is empty: give the time of at least one stage")
        if not self.activation_bytes:
            object.__setattr__(self, "activation_bytes", (1,) * stages)
        for name in ("forward_ms", "output_gradient_ms", "weight_gradient_ms", "activation_bytes"):
            values: tuple[float, ...] = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) != stages:
                raise ValueError(f"{name} has {len(values)} entries, forward_ms has {stages}: give one a stage")
            for stage, value in enumerate(values, 1):
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{name} of stage {stage} is {value}: give 0 or more")

    @classmethod
    def uniform(cls, stages: int) -> StageCosts:
        """All stages alike, F, O and W a millisecond each: the units of the paper's figures."""
        return cls((1,) * stages, (1,) * stages, (1,) * stages)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.forward_ms)

    @property
    def total_ms(self) -> tuple[float, ...]:
        """F, O and W together, by stage: what :func:`block` balances."""
        return tuple(map(sum, zip(self.forward_ms, self.output_gradient_ms, self.weight_gradient_ms, strict=True)))

    def time_ms(self, task: Task) -> float:
        """Time of an F, O or W."""
        return self.by_kind(task.kind)[task.layer - 1]

    def by_kind(self, kind: Kind) -> tuple[float, ...]:
        """Times of a kind, by stage."""
        match kind:
            case Kind.F:
                return self.forward_ms
            case Kind.O:
                return self.output_gradient_ms
            case Kind.W:
                return self.weight_gradient_ms
        raise ValueError(f"a pipeline's stages have times for F, O and W, not for {kind}")


Hops = float | Sequence[Sequence[float]]
"""Milliseconds of a message from rank to rank: one number, or ``hops[source][target]``. Each direction of each pair of
ranks is a link of its own, and carries one message at a time."""


def hop_table(hops: Hops, ranks: int) -> tuple[tuple[float, ...], ...]:
    """Return ``hops`` as a table of ``ranks`` x ``ranks``.

    Raises:
        ValueError: when the table has another size, or a time is negative or not finite.
    """
    if isinstance(hops, int | float):
        table = tuple(tuple(0.0 if a == b else float(hops) for b in range(ranks)) for a in range(ranks))
    else:
        # A rank sends itself nothing, whatever stands on the diagonal.
        table = tuple(tuple(0.0 if a == b else float(hop) for b, hop in enumerate(row)) for a, row in enumerate(hops))
        if len(table) != ranks or any(len(row) != ranks for row in table):
            sizes = f"{len(table)} rows of {sorted({len(row) for row in table})}"
            raise ValueError(f"hops has {sizes} entries for {ranks} ranks: give {ranks} x {ranks}, or one number")
    for source, row in enumerate(table):
        for target, hop_ms in enumerate(row):
            if not (math.isfinite(hop_ms) and hop_ms >= 0):
                raise ValueError(
                    f"the hop from rank {source} to rank {target} is {hop_ms}: give 0 or more milliseconds"
                )
    return table


def check_stages(costs: StageCosts, placement: Placement) -> None:
    """Raise a ValueError unless ``costs`` and ``placement`` are about the same number of stages."""
    if costs.stages != placement.stages:
        raise ValueError(
            f"costs are of {costs.stages} stages, the placement has {placement.stages}: describe the same stages"
        )
