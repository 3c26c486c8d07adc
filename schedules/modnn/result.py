"""What a simulated step inside a budget did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from retime.schedules.timeline import Span

COMPUTE, TRANSFER = "compute", "transfer"
"""The two lanes: the paper's Strm_C and Strm_D."""


class Direction(StrEnum):
    """Why a block is copied."""

    OFFLOAD = "offload"
    """Device to host."""
    PREFETCH = "prefetch"
    """Host to device, of a block that was on the device before."""
    INPUT = "input"
    """Host to device, the first time: every way to train has to do it."""


@dataclass(frozen=True)
class Copy:
    """One transfer."""

    block: str
    direction: Direction
    start_ms: float
    end_ms: float
    bytes: int


@dataclass(frozen=True)
class Placement:
    """A stretch of the device's memory and the time for which a block, or a task's workspace, holds it."""

    name: str
    offset: int
    bytes: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Stall:
    """A task that waited for the transfer stream."""

    task: str
    ms: float


@dataclass(frozen=True)
class OffloadSchedule:
    """One round through the model: what runs, what is copied and where everything lies.

    Args:
        samples: the sub-batch size.
        budget_bytes: what it was made for.
        finish_ms: when the last task ends, in milliseconds from the start of the round.
        start_ms: by task, when it starts.
        compute_ms: the time of all tasks with the algorithms chosen; the rest of ``finish_ms`` is waiting.
        stalls: the tasks that waited.
        algorithms: by task with more than one algorithm, the name of the one it runs by.
        copies: all transfers, by start.
        placements: what lay where, by start.
        defragmentations: tasks before which everything was offloaded, because the free memory was in pieces.
        resident_bytes: what stays in device memory throughout.
        peak_bytes: with ``resident_bytes`` and the holes between blocks: never above the budget.
        live_peak_bytes: the same without the holes.
    """

    samples: int
    budget_bytes: int
    finish_ms: float
    start_ms: Mapping[str, float]
    compute_ms: float
    stalls: tuple[Stall, ...]
    algorithms: Mapping[str, str]
    copies: tuple[Copy, ...]
    placements: tuple[Placement, ...]
    defragmentations: tuple[str, ...]
    resident_bytes: int
    peak_bytes: int
    live_peak_bytes: int
    spans: tuple[Span, ...]
    """Boxes for :func:`retime.schedules.write_png` and :func:`retime.schedules.write_chrome_trace`."""

    @property
    def stall_ms(self) -> float:
        """Waiting time of all tasks together."""
        return self.finish_ms - self.compute_ms

    def moved_bytes(self, *directions: Direction) -> int:
        """Bytes copied in these directions; all of them when none is given."""
        wanted = directions or tuple(Direction)
        return sum(copy.bytes for copy in self.copies if copy.direction in wanted)

    @property
    def offloaded_bytes(self) -> int:
        return self.moved_bytes(Direction.OFFLOAD)

    @property
    def prefetched_bytes(self) -> int:
        """Fetched again; the first copy of an input is not counted, see :class:`Direction`."""
        return self.moved_bytes(Direction.PREFETCH)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The blocks that leave the device and come back, once each, in the order in which they first leave."""
        names = (copy.block for copy in self.copies if copy.direction is Direction.OFFLOAD)
        return tuple(dict.fromkeys(names))
