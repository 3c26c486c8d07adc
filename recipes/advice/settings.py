"""Settings of the recipe that trains as `retime advise` says, and of the demo."""

from dataclasses import dataclass, field
from typing import Any

from retime.recipes.core.schema import Settings


@dataclass
class AdviceSettings(Settings):
    """Training as `retime advise` says, and the demo. `steps` are of a fit, after those in which methods settle.

    In the demo they are those after which weights are compared.
    """

    cases: dict[str, Any] = field(default_factory=dict)  # name: {model, data, batch_size, optimizer}; demo: methods too
    processes: int = 5  # fits of each way, in processes of their own
    seconds: float = 60.0  # at most, of each method
    timeout_s: float = 900.0
