"""Peaks under any plan from two dry runs: when each saved storage lives if it stays, and when if it leaves.

A step runs the same operations under every plan, so the memory at an operation is what is never saved, plus the saved
storages that live there: those that stay as in the plain run, those that leave as in a run where all of them leave.
That takes a millisecond a plan, where a dry run takes up to a second; the plan that is chosen is dry-run at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from retime.mechanisms.memory_budget.dry_run.profile import Size, StepProfile
from retime.mechanisms.memory_budget.dry_run.trace import Operation, TracedStorage
from retime.schedules.budget import BlockKind, OffloadPlan, Phase
from retime.schedules.errors import ScheduleError


@dataclass(frozen=True)
class Life:
    """A storage's size and the operations from and to which it lives."""

    size: Size
    born: int
    dies: int


@dataclass(frozen=True)
class SavedLife:
    """One saved storage of one forward pass.

    Attributes:
        number: in the plan.
        saved: the operation after which it is first saved.
        plain: its life if it stays.
        source: its life if it leaves.
        restored: lives of the storages that it comes back in, if it leaves.
    """

    number: int
    saved: int
    plain: Life
    source: Life
    restored: tuple[Life, ...]


class Lifetimes:
    """The lives of all storages of a step, at one sub-batch size or, from two, at any.

    Updates, where the runs have any, are left out.

    Args:
        plain: the step under a plan that offloads nothing.
        away: the step under the same sub-batch size with everything offloaded, nothing fetched ahead and no copies in
            flight.
        larger: the plain step again for a larger sub-batch; then sizes follow the sub-batch size.
        batch_bytes: the whole batch, where the runs had a smaller one.

    Raises:
        ScheduleError: the runs differ in more than where storages live, so that they cannot be put together.
    """

    def __init__(
        self,
        plain: StepProfile,
        away: StepProfile,
        larger: StepProfile | None = None,
        batch_bytes: int | None = None,
    ) -> None:
        operations = _before_update(plain)
        names = [operation.name for operation in operations]
        for other in (away, larger or plain):
            if [operation.name for operation in _before_update(other)] != names:
                raise ScheduleError("the step runs other operations for another plan or sub-batch size")
        self.operations = len(names)
        self.kinds = [operation.kind for operation in operations]
        pairs = [
            (storage, size)
            for storage, size in zip(plain.trace.storages, _sizes(plain, larger or plain), strict=True)
            if storage.born < self.operations
        ]
        self.unsaved = [
            self._life(storage, size)
            for storage, size in pairs
            if storage.number is None and (batch_bytes is None or not _is_batch(storage))
        ]
        if batch_bytes is not None:
            self.unsaved.append(Life(Size(batch_bytes), 0, self.operations - 1))
        by_number = {
            (storage.forward_pass, storage.number): size for storage, size in pairs if storage.number is not None
        }
        self.second = plain.trace.starts[1] if len(plain.trace.starts) > 1 else self.operations
        self._still: dict[tuple[int, int], list[int]] = {}
        self.passes = [self._saved(index, plain, away, by_number) for index in range(len(plain.trace.saves))]

    def peak_bytes(
        self,
        plan: OffloadPlan,
        in_flight_bytes: int = 0,
        scratch: Mapping[tuple[Phase, str, str], Size] | None = None,
        second: int | None = None,
    ) -> int:
        """The most that is held at once under ``plan``, with what operations allocate for themselves by their kind.

        ``second`` is how many samples the second sub-batch has, if that is not as many as the first.
        """
        sizes = plan.sub_batch, second or plan.sub_batch
        steps = self._staying(sizes).copy()
        for saved in self.passes:
            leaving = [one for one in saved if one.number in plan.offload]
            for one in leaving:
                self._add(steps, one.plain, sizes, -1)
            for life in _leaving_lives(leaving, plan, in_flight_bytes):
                self._add(steps, life, sizes)
        if not scratch:
            return max(accumulate(steps))
        extra = [{kind: size.at(samples) for kind, size in scratch.items()} for samples in sizes]
        # No operation is at the last entry, after the end of the step.
        return max(
            held + extra[at >= self.second].get(kind, 0)
            for at, (held, kind) in enumerate(zip(accumulate(steps), self.kinds, strict=False))
        )

    def order(self, samples: int) -> list[int]:
        """Numbers of saved storages, those first that free most bytes for the longest time."""

        def gain(one: SavedLife) -> int:
            gap = one.plain.dies - one.source.dies - sum(life.dies - life.born + 1 for life in one.restored)
            return -one.plain.size.at(samples) * gap

        return [one.number for one in sorted(self.passes[0], key=gain)] if self.passes else []

    def saved_bytes(self, numbers: Iterable[int], samples: int) -> int:
        """Size of these saved storages of one sub-batch."""
        chosen = set(numbers)
        return sum(one.plain.size.at(samples) for one in self.passes[0] if one.number in chosen)

    def read_bytes(self, numbers: Iterable[int], samples: int) -> int:
        """What of these comes back in one sub-batch: some come back twice."""
        chosen = set(numbers)
        return sum(one.plain.size.at(samples) * len(one.restored) for one in self.passes[0] if one.number in chosen)

    def _life(self, storage: TracedStorage, size: Size) -> Life:
        return Life(size, max(storage.born, 0), min(storage.dies, self.operations - 1))

    def _saved(
        self, index: int, plain: StepProfile, away: StepProfile, sizes: dict[tuple[int, int], Size]
    ) -> list[SavedLife]:
        def lives(run: StepProfile, restored: bool) -> dict[int, list[Life]]:
            found: dict[int, list[Life]] = {}
            for storage in run.trace.storages:
                if storage.number is not None and storage.forward_pass == index and storage.restored is restored:
                    life = self._life(storage, sizes.get((index, storage.number), Size(storage.nbytes)))
                    found.setdefault(storage.number, []).append(life)
            return found

        stays, leaves, back = lives(plain, False), lives(away, False), lives(away, True)
        if stays.keys() != leaves.keys():
            raise ScheduleError("the step saves other storages when they are offloaded")
        saves = plain.trace.saves[index]
        return [
            SavedLife(number, saves[number], stays[number][0], leaves[number][0], tuple(back.get(number, ())))
            for number in sorted(stays)
        ]

    def _staying(self, sizes: tuple[int, int]) -> list[int]:
        """By how much what is held changes at each operation, if nothing leaves."""
        steps = self._still.get(sizes)
        if steps is None:
            steps = self._still[sizes] = [0] * (self.operations + 1)
            for life in (*self.unsaved, *(one.plain for saved in self.passes for one in saved)):
                self._add(steps, life, sizes)
        return steps

    def _add(self, steps: list[int], life: Life, sizes: tuple[int, int], sign: int = 1) -> None:
        if life.dies >= life.born:
            size = sign * life.size.at(sizes[life.born >= self.second])
            steps[life.born] += size
            steps[life.dies + 1] -= size


def _before_update(run: StepProfile) -> list[Operation]:
    return [operation for operation in run.trace.operations if operation.phase is not Phase.UPDATE]


def _sizes(small: StepProfile, large: StepProfile) -> list[Size]:
    """The size of each storage of ``small``."""
    first, last = small.trace.storages, large.trace.storages
    samples = small.plan.sub_batch, large.plan.sub_batch
    if len(first) != len(last):
        raise ScheduleError("the step makes other storages for another sub-batch size")
    pairs = zip(first, last, strict=True)
    return [Size.through(samples[0], low.nbytes, samples[1], high.nbytes) for low, high in pairs]


def _is_batch(storage: TracedStorage) -> bool:
    return storage.kind is BlockKind.INPUT and storage.born < 0


def _leaving_lives(leaving: list[SavedLife], plan: OffloadPlan, in_flight_bytes: int) -> list[Life]:
    """Lives of storages that leave: held while in flight, back some storages before they are needed."""
    lives = []
    going = [one for one in leaving if one.restored]  # the others are there when they are needed
    released = _released(sorted(going, key=lambda one: one.source.dies), plan.sub_batch, in_flight_bytes)
    fetches = sorted((life.born, one.number, life) for one in leaving for life in one.restored)
    for one in leaving:
        at = released.get(one.number)
        if at is None:  # still in flight when the backward pass needs it: it never goes
            last = max((life.dies for life in one.restored), default=one.source.dies)
            lives.append(Life(one.source.size, one.source.born, max(last, one.source.dies)))
        else:
            lives.append(Life(one.source.size, one.source.born, max(one.source.dies, at)))
    for place, (born, number, life) in enumerate(fetches):
        if released.get(number) is not None:
            ahead = fetches[max(0, place - plan.prefetch)][0]
            lives.append(Life(life.size, min(born, ahead), life.dies))
    return lives


def _released(leaving: list[SavedLife], samples: int, limit: int) -> dict[int, int]:
    """By number: the operation up to which a copy in flight holds the source, as OffloadSavedTensors counts."""
    released: dict[int, int] = {}
    waiting: list[SavedLife] = []
    held = 0
    for one in leaving:
        waiting.append(one)
        held += one.source.size.at(samples)
        while held > limit:
            oldest = waiting.pop(0)
            held -= oldest.source.size.at(samples)
            released[oldest.number] = one.source.dies
    return released
