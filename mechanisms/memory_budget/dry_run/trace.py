"""What one training step does to memory: every operation, and every storage with the operations it lives through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from retime.schedules.budget import BlockKind, Phase

FOREVER = 2**62


@dataclass
class TracedStorage:
    """One storage of the step.

    Attributes:
        nbytes: as the allocator rounds it.
        kind: what it holds.
        born: the operation that made it; -1: it was there before the step.
        dies: the last operation that it lives through; :data:`FOREVER`: it outlives the step.
        number: its number among the saved storages of its forward pass; None: no node saved it.
        forward_pass: which sub-batch saved it, from 0.
        restored: it holds the data of that saved storage, which came back from the host.
    """

    nbytes: int
    kind: BlockKind
    born: int
    dies: int = FOREVER
    number: int | None = None
    forward_pass: int = 0
    restored: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation; storages by their index in the trace."""

    name: str
    layer: str
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def kind(self) -> tuple[Phase, str, str]:
        """Which other operations are like this one: of the same phase, layer and name."""
        return self.phase, self.layer, self.name


@dataclass
class Trace:
    """A traced step.

    Attributes:
        operations: in the order in which they ran.
        storages: by index.
        peak_bytes: the most that was held at once.
        peak_at: index of the operation during which that was; -1: before the first.
        update_peak_bytes: the most that was held during the update; 0 if none ran.
        saves: for each forward pass, by saved number: the operation after which it was first saved.
        uses: for each forward pass, by number of a storage that moved: operations before which the backward pass asked
            for it.
        parameters: so many of the first storages are parameters.
        starts: for each forward pass, its first operation.
    """

    operations: list[Operation] = field(default_factory=list)
    storages: list[TracedStorage] = field(default_factory=list)
    peak_bytes: int = 0
    peak_at: int = -1
    update_peak_bytes: int = 0
    saves: list[dict[int, int]] = field(default_factory=list)
    uses: list[dict[int, list[int]]] = field(default_factory=list)
    parameters: int = 0
    starts: list[int] = field(default_factory=list)

    @property
    def writes_parameters(self) -> bool:
        """Whether forward or backward passes write into parameters, as a model that clamps its weights does."""
        return any(index < self.parameters for index in self._written())

    @property
    def writes_batch(self) -> bool:
        """Whether forward or backward passes write into the batch that they are given."""
        return any(
            self.storages[index].kind is BlockKind.INPUT and self.storages[index].born < 0 for index in self._written()
        )

    def _written(self) -> Iterator[int]:
        for operation in self.operations:
            if operation.phase is not Phase.UPDATE:
                yield from operation.writes
