"""What a dry run found: the peak and who makes it, what stays, what is saved, and the step as a task graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from retime.mechanisms.memory_budget.dry_run.trace import FOREVER, Operation, Trace, TracedStorage
from retime.schedules.budget import STAYS, BlockKind, OffloadPlan, Phase


@dataclass(frozen=True)
class Size:
    """Bytes, or milliseconds: a fixed part and a part for each sample."""

    fixed: float
    sample: float = 0.0

    @classmethod
    def through(cls, small: int, of_small: float, large: int, of_large: float) -> Size:
        """The line through what two numbers of samples need; without a part for each where these are equal."""
        sample = (of_large - of_small) / (large - small) if large != small else 0.0
        return cls(of_small - sample * small, sample)

    def at(self, samples: int) -> int:
        """Bytes with so many samples."""
        return max(0, round(self.fixed + self.sample * samples))


@dataclass(frozen=True)
class SavedStorage:
    """One storage that a forward pass saved for its backward pass.

    Attributes:
        number: its ordinal in an :class:`OffloadPlan`.
        nbytes: its size.
        layer: the layer that made it.
        made: index of the operation that made it.
        freed: index of the last operation it lived through.
    """

    number: int
    nbytes: int
    layer: str
    made: int
    freed: int


@dataclass(frozen=True)
class LargestTask:
    """The operation during which most was held beside what stays."""

    name: str
    layer: str
    phase: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} in the {self.phase} pass of {self.layer}"


@dataclass(frozen=True)
class StepProfile:
    """A traced step.

    Attributes:
        plan: what it ran under.
        samples: of the whole batch.
        trace: operations and storages.
    """

    plan: OffloadPlan
    samples: int
    trace: Trace

    @property
    def peak_bytes(self) -> int:
        """The most that the step's tensors held at once."""
        return self.trace.peak_bytes

    def held_bytes(self, smallest: int = 0) -> list[int]:
        """What tensors hold during each operation; of those that the step makes only such of so many bytes or more."""
        steps = [0] * (len(self.trace.operations) + 1)
        for storage in self.trace.storages:
            born, dies = max(storage.born, 0), min(storage.dies, self._end)
            if dies >= born and (storage.born < 0 or storage.nbytes >= smallest):
                steps[born] += storage.nbytes
                steps[dies + 1] -= storage.nbytes
        return list(accumulate(steps[:-1]))

    def peak_with(self, scratch: Mapping[tuple[Phase, str, str], Size], smallest: int = 0) -> int:
        """The peak with what operations allocate for themselves, by their kind; ``smallest`` as above."""
        none = Size(0)
        return max(
            0 if smallest else self.peak_bytes,
            *(
                held + scratch.get(operation.kind, none).at(self.plan.sub_batch)
                for held, operation in zip(self.held_bytes(smallest), self.trace.operations, strict=True)
            ),
        )

    @cached_property
    def bytes_by_kind(self) -> dict[BlockKind, int]:
        """Bytes of each kind that are there in the middle of training: gradients at their fullest."""
        totals = dict.fromkeys(BlockKind, 0)
        for storage in self.trace.storages:
            if storage.kind in STAYS or (storage.kind is BlockKind.INPUT and storage.born < 0):
                before = storage.born < 0 and storage.kind is not BlockKind.WEIGHT_GRADIENT  # old gradients go
                lasting = before or storage.dies == FOREVER
                totals[storage.kind] += storage.nbytes if lasting else 0
        return totals

    @property
    def resident_bytes(self) -> int:
        """Parameters, buffers, gradients, optimizer states and the batch."""
        return sum(self.bytes_by_kind.values())

    @cached_property
    def saved(self) -> tuple[SavedStorage, ...]:
        """Storages of the first forward pass, by number."""
        found = {}
        for storage in self.trace.storages:
            if storage.number is not None and storage.forward_pass == 0 and not storage.restored:
                found[storage.number] = SavedStorage(
                    storage.number, storage.nbytes, self._layer(storage), storage.born, min(storage.dies, self._end)
                )
        return tuple(found[number] for number in sorted(found))

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward pass of one sub-batch saves."""
        return sum(storage.nbytes for storage in self.saved)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes that the plan moves to the host and back in one sub-batch."""
        back = (one.nbytes for one in self.trace.storages if one.restored and one.forward_pass == 0)
        return sum(one.nbytes for one in self.saved if one.number in self.plan.offload), sum(back)

    @property
    def largest_task(self) -> LargestTask:
        """The operation at the peak."""
        at = self.trace.peak_at
        if not 0 <= at < len(self.trace.operations):
            return LargestTask("the batch", "the model", "forward", self.peak_bytes)
        operation: Operation = self.trace.operations[at]
        moving = sum(
            storage.nbytes
            for storage in self.trace.storages
            if storage.born <= at <= storage.dies and storage.kind not in STAYS
        )
        return LargestTask(operation.name, operation.layer, operation.phase.value, moving)

    @property
    def _end(self) -> int:
        return len(self.trace.operations) - 1

    def _layer(self, storage: TracedStorage) -> str:
        return self.trace.operations[storage.born].layer if 0 <= storage.born <= self._end else ""
