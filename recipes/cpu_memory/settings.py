"""Settings of the recipes about a CPU's memory."""

from dataclasses import dataclass, field
from typing import Any

from retime.recipes.core.schema import Settings


@dataclass
class AllocatorSettings(Settings):
    """The settings of the recipes about a CPU's memory. `rounds` are blocks in each process."""

    cases: dict[str, Any] = field(default_factory=dict)  # name: {model, data, batch_size, optimizer, ours, steps}
    allocators: list[str] = field(default_factory=list)  # that the plain step runs with
    libraries: dict[str, Any] = field(default_factory=dict)  # name: file, for libraries in unusual places
    processes: int = 5  # of each allocator: where memory lies is decided once a process
    timeout_s: float = 900.0
