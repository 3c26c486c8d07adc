"""Settings of the optimizer-fusion recipes."""

from dataclasses import dataclass, field
from typing import Any

from retime.recipes.core.schema import Settings


@dataclass
class FusionSettings(Settings):
    """The optimizer-fusion recipes' settings. `_target_` may name any importable callable."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # a data set of (input, target) pairs
    optimizer: dict[str, Any] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)
    batch_size: int | None = None
    # axes of the figures that have one; a figure without that axis ignores none of them, it has them empty
    batch_sizes: list[int] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    cases: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
