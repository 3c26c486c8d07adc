"""Settings of the recipes about gradient accumulation on the host."""

from dataclasses import dataclass, field
from typing import Any

from retime.recipes.core.schema import Settings


@dataclass
class AccumulationSettings(Settings):
    """The settings of the recipes about gradient accumulation on the host. `steps` are of a fit, after its warm-up."""

    # sums alone
    rank_counts: list[int] = field(default_factory=list)
    sizes_mb: list[int] = field(default_factory=list)
    repeats: int = 20  # of a sum, for whether it comes out the same
    # fits
    cases: dict[str, Any] = field(default_factory=dict)  # name: {model, data, batch_size, optimizer, ranks, variants}
    variants: dict[str, Any] = field(default_factory=dict)  # label: a block with a _target_ that makes a strategy
    timeout_s: float = 900.0
    # memory
    batch_sizes: list[int] = field(default_factory=list)  # two, ascending: what an image takes is their difference
    # outputs while training: `rounds` seeds
    check_every: int = 20  # steps
    accuracy: float = 0.5  # share of held-out images
