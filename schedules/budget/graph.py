"""The task and data flow graph of one training step: what each task reads, writes and costs (moDNN, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from retime.schedules.errors import ScheduleError


class BlockKind(StrEnum):
    """What a data block holds."""

    INPUT = "input"
    """A part of the batch: it comes from the host and never needs to be offloaded."""
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    """Gradient of an activation: the paper's delta."""
    WEIGHT = "weight"
    """A parameter or a buffer: stays in device memory."""
    WEIGHT_GRADIENT = "weight gradient"
    STATE = "state"
    """State of the optimizer: stays in device memory."""


class Phase(StrEnum):
    """Which part of the step a task belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


STAYS = frozenset({BlockKind.WEIGHT, BlockKind.WEIGHT_GRADIENT, BlockKind.STATE})
"""Kinds that a plan leaves in device memory, as the paper does (section 3.2)."""


@dataclass(frozen=True)
class Block:
    """One data block: a tensor's storage, of ``fixed_bytes + samples * sample_bytes``.

    Raises:
        ScheduleError: a size is negative.
    """

    name: str
    kind: BlockKind
    fixed_bytes: int = 0
    sample_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.fixed_bytes < 0 or self.sample_bytes < 0:
            raise ScheduleError(f"block {self.name!r} has a negative size: give 0 or more bytes")

    def size_bytes(self, samples: int) -> int:
        """Its size with a batch of so many samples, rounded up."""
        return self.fixed_bytes + -int(-self.sample_bytes * samples // 1)


@dataclass(frozen=True)
class Algorithm:
    """One way to run a task: its time and its workspace (section 5.2.3), each fixed and a sample."""

    name: str = "default"
    fixed_ms: float = 0.0
    sample_ms: float = 0.0
    fixed_workspace_bytes: int = 0
    sample_workspace_bytes: float = 0.0

    def ms(self, samples: int) -> float:
        """Its time with a batch of so many samples."""
        return self.fixed_ms + self.sample_ms * samples

    def workspace_bytes(self, samples: int) -> int:
        """Its workspace with a batch of so many samples, rounded up."""
        return self.fixed_workspace_bytes + -int(-self.sample_workspace_bytes * samples // 1)


@dataclass(frozen=True)
class GraphTask:
    """One task: reads blocks, writes blocks, by one of its algorithms; the first one is the baseline of Eq. 10."""

    name: str
    phase: Phase
    layer: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    algorithms: tuple[Algorithm, ...] = (Algorithm(),)


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in the order in which they run, and the blocks they name.

    Raises:
        ScheduleError: a task names an unknown block, or reads one that nothing has written and that is neither input
            nor one that stays.
    """

    blocks: Mapping[str, Block]
    tasks: tuple[GraphTask, ...]

    def __post_init__(self) -> None:
        written = {name for name, block in self.blocks.items() if block.kind in STAYS | {BlockKind.INPUT}}
        for task in self.tasks:
            for name in (*task.reads, *task.writes):
                if name not in self.blocks:
                    raise ScheduleError(f"task {task.name!r} names block {name!r}, which the graph does not have")
            for name in task.reads:
                if name not in written:
                    raise ScheduleError(f"task {task.name!r} reads block {name!r} before any task has written it")
            written.update(task.writes)

    def resident_bytes(self, samples: int) -> int:
        """What stays in device memory throughout: S_W of Eq. 7, with gradients and optimizer states."""
        return sum(block.size_bytes(samples) for block in self.blocks.values() if block.kind in STAYS)
