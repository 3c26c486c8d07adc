"""What a dry run found: the peak and who makes it, what stays, what is saved, and the step as a task graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add

from retime.mechanisms.memory_budget.dry_run.trace import FOREVER, Operation, Trace, TracedStorage
from retime.schedules.budget import STAYS, Block, BlockKind, GraphTask, OffloadPlan, Phase, TaskGraph
from retime.schedules.errors import ScheduleError

BY_CHANCE = (
    "; code that branches by random numbers (LayerDrop, stochastic depth), counters or time needs dry_run='off', which "
    "plans from the first step of training"
)


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
    """

    plan: OffloadPlan
    samples: int
    trace: Trace

    @property
    def peak_bytes(self) -> int:
        """The most that the step's tensors held at once."""
        return self.trace.peak_bytes

    def held_bytes(self, smallest: int = 0) -> list[int]:
        """Bytes of tensors during each operation; of those that the step makes only such of so many bytes or more."""
        end = len(self.trace.operations) - 1
        steps = [0] * (end + 2)
        for storage in self.trace.storages:
            born, dies = max(storage.born, 0), min(storage.dies, end)
            if dies >= born and (storage.born < 0 or storage.nbytes >= smallest):
                steps[born] += storage.nbytes
                steps[dies + 1] -= storage.nbytes
        return list(accumulate(steps[:-1]))

    def peak_with(self, scratch: Mapping[tuple[Phase, str, str], Size], smallest: int = 0) -> int:
        """The peak with what operations allocate for themselves, by their kind; ``smallest`` as above."""
        own = {kind: size.at(self.plan.sub_batch) for kind, size in scratch.items()}
        pairs = zip(self.held_bytes(smallest), self.trace.operations, strict=True)
        least = 0 if smallest else self.peak_bytes
        return max(least, *(nbytes + own.get(operation.kind, 0) for nbytes, operation in pairs))

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
    def saved(self) -> tuple[TracedStorage, ...]:
        """Storages that the first forward pass saved for its backward pass, by number."""
        by_number = {
            storage.number: storage
            for storage in self.trace.storages
            if storage.number is not None and storage.forward_pass == 0 and not storage.restored
        }
        return tuple(by_number[number] for number in sorted(by_number))

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
        operation = self.trace.operations[at]
        moving = sum(
            storage.nbytes
            for storage in self.trace.storages
            if storage.born <= at <= storage.dies and storage.kind not in STAYS
        )
        return LargestTask(operation.name, operation.layer, operation.phase.value, moving)


# Peaks under any plan from two dry runs: when each saved storage lives if it stays, and when if it leaves.
#
# A step runs the same operations under every plan, so the memory at an operation is what is never saved, plus the
# saved storages that live there: those that stay as in the plain run, those that leave as in a run where all of them
# leave. That takes a millisecond a plan, where a dry run takes up to a second; the plan that is chosen is dry-run at
# the end.


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
        self, plain: StepProfile, away: StepProfile, larger: StepProfile | None = None, batch_bytes: int | None = None
    ) -> None:
        operations = _before_update(plain)
        names = [operation.name for operation in operations]
        for other in (away, larger or plain):
            if [operation.name for operation in _before_update(other)] != names:
                raise ScheduleError(f"the step runs other operations for another plan or sub-batch size{BY_CHANCE}")
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
            if storage.number is None
            and (batch_bytes is None or storage.kind is not BlockKind.INPUT or storage.born >= 0)
        ]
        if batch_bytes is not None:
            self.unsaved.append(Life(Size(batch_bytes), 0, self.operations - 1))
        by_number = {
            (storage.forward_pass, storage.number): size for storage, size in pairs if storage.number is not None
        }
        self.second = plain.trace.starts[1] if len(plain.trace.starts) > 1 else self.operations
        self._still: dict[tuple[int, int], list[int]] = {}
        self._scratch: Mapping[tuple[Phase, str, str], Size] = {}
        self._own: dict[tuple[int, int], list[int]] = {}
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
        # No operation is at the last entry, after the end of the step.
        most: int = max(map(add, accumulate(steps), self._own_bytes(scratch, sizes)))
        return most

    def order(self, samples: int) -> list[int]:
        """Numbers of saved storages, those first that free most bytes for the longest time."""

        def gain(one: SavedLife) -> int:
            gap = one.plain.dies - one.source.dies - sum(life.dies - life.born + 1 for life in one.restored)
            return -one.plain.size.at(samples) * gap

        return [one.number for one in sorted(self.passes[0], key=gain)] if self.passes else []

    def moved_bytes(self, plan: OffloadPlan) -> tuple[int, int]:
        """Bytes that a plan moves to the host and back in one sub-batch: some come back twice."""
        away = [one for one in self.passes[0] if one.number in plan.offload]
        sizes = [one.plain.size.at(plan.sub_batch) for one in away]
        return sum(sizes), sum(size * len(one.restored) for size, one in zip(sizes, away, strict=True))

    def _life(self, storage: TracedStorage, size: Size) -> Life:
        return Life(size, max(storage.born, 0), min(storage.dies, self.operations - 1))

    def _saved(
        self, index: int, plain: StepProfile, away: StepProfile, sizes: dict[tuple[int, int], Size]
    ) -> list[SavedLife]:
        def lives(run: StepProfile, restored: bool) -> dict[int, list[Life]]:
            by_number: dict[int, list[Life]] = {}
            for storage in run.trace.storages:
                if storage.number is not None and storage.forward_pass == index and storage.restored is restored:
                    life = self._life(storage, sizes.get((index, storage.number), Size(storage.nbytes)))
                    by_number.setdefault(storage.number, []).append(life)
            return by_number

        stays, leaves, back = lives(plain, False), lives(away, False), lives(away, True)
        if stays.keys() != leaves.keys():
            raise ScheduleError("the step saves other storages when they are offloaded")
        saves = plain.trace.saves[index]
        return [
            SavedLife(number, saves[number], stays[number][0], leaves[number][0], tuple(back.get(number, ())))
            for number in sorted(stays)
        ]

    def _staying(self, sizes: tuple[int, int]) -> list[int]:
        """Return by how much what is held changes at each operation, if nothing leaves."""
        steps = self._still.get(sizes)
        if steps is None:
            steps = self._still[sizes] = [0] * (self.operations + 1)
            for life in (*self.unsaved, *(one.plain for saved in self.passes for one in saved)):
                self._add(steps, life, sizes)
        return steps

    def _own_bytes(self, scratch: Mapping[tuple[Phase, str, str], Size], sizes: tuple[int, int]) -> list[int]:
        """Return what each operation allocates for itself; many plans are asked about with the same ``scratch``."""
        if self._scratch is not scratch:
            self._scratch, self._own = scratch, {}
        if sizes not in self._own:
            extra = [{kind: size.at(samples) for kind, size in scratch.items()} for samples in sizes]
            self._own[sizes] = [extra[at >= self.second].get(kind, 0) for at, kind in enumerate(self.kinds)]
        return self._own[sizes]

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
    in_flight_bytes = 0
    for one in leaving:
        waiting.append(one)
        in_flight_bytes += one.source.size.at(samples)
        while in_flight_bytes > limit:
            oldest = waiting.pop(0)
            in_flight_bytes -= oldest.source.size.at(samples)
            released[oldest.number] = one.source.dies
    return released


# The task and data flow graph of a profiled step (moDNN, section 3.2), with sizes as functions of the batch size.


_LETTERS = dict(zip(BlockKind, ("x", "a", "g", "w", "dw", "s"), strict=True))
"""Of inputs, activations, gradients, weights, their gradients and states, as blocks are named."""


def task_graph(small: StepProfile, large: StepProfile, *checks: StepProfile) -> TaskGraph:
    """One task an operation, one block a storage; each size is fixed bytes and bytes a sample.

    Operations that only look at storages (views) are left out.

    Args:
        small, large: profiles of the same step on two numbers of samples, each in one piece and with nothing offloaded.
        checks: further profiles, which the sizes have to predict.

    Raises:
        ScheduleError: the profiles do not run the same operations, or a size does not grow by the sample.
    """
    profiles = sorted((small, large, *checks), key=lambda profile: profile.samples)
    for profile in profiles:
        if profile.plan.offload or profile.plan.sub_batch < profile.samples:
            raise ScheduleError(
                f"a profile under the plan '{profile.plan}' is no plain step: profile one without a plan"
            )
    if profiles[0].samples == profiles[-1].samples:
        raise ScheduleError(
            "two profiles of different batch sizes are needed: TrainingStep.of_size() makes smaller ones"
        )
    _same_operations(profiles)
    first, last = profiles[0], profiles[-1]
    blocks = {}
    names = []
    for index, (low, high) in enumerate(zip(first.trace.storages, last.trace.storages, strict=True)):
        size = Size.through(first.samples, low.nbytes, last.samples, high.nbytes)
        fixed, slope = round(size.fixed), size.sample
        for profile in profiles:
            got = profile.trace.storages[index].nbytes
            # Rounding by the allocator moves a size by less than one of its steps.
            if fixed < 0 or slope < 0 or abs(fixed + slope * profile.samples - got) > max(512.0, 1e-6 * got):
                sizes = ", ".join(f"{p.trace.storages[index].nbytes} at {p.samples}" for p in profiles)
                layer = first.trace.operations[low.born].layer if low.born >= 0 else "before the step"
                raise ScheduleError(f"a storage made in {layer} does not grow by the sample: bytes {sizes}")
        name = f"{_LETTERS[_kind(low)]}{index}"
        names.append(name)
        blocks[name] = Block(name, _kind(low), fixed, slope)
    tasks = [
        GraphTask(
            name=f"{position} {operation.name}",
            phase=operation.phase,
            layer=operation.layer,
            reads=tuple(names[index] for index in operation.reads),
            writes=tuple(names[index] for index in operation.writes),
        )
        for position, operation in enumerate(first.trace.operations)
        if operation.writes
    ]
    return TaskGraph(blocks, tuple(tasks))


def _same_operations(profiles: list[StepProfile]) -> None:
    first = profiles[0]
    for other in profiles[1:]:
        pairs = zip(first.trace.operations, other.trace.operations, strict=False)
        for position, (one, two) in enumerate(pairs):
            if (one.name, one.layer, one.reads, one.writes) != (two.name, two.layer, two.reads, two.writes):
                raise ScheduleError(
                    f"the step runs other operations with {other.samples} samples than with {first.samples}: operation "
                    f"{position} is {two.name} in {two.layer}, not {one.name} in {one.layer}{BY_CHANCE}"
                )
        counts = len(first.trace.operations), len(other.trace.operations)
        if counts[0] != counts[1]:
            raise ScheduleError(
                f"the step runs {counts[1]} operations with {other.samples} samples, "
                f"but {counts[0]} with {first.samples}{BY_CHANCE}"
            )


def _kind(storage: TracedStorage) -> BlockKind:
    if storage.kind in STAYS and storage.born >= 0 and storage.dies != FOREVER:
        return BlockKind.GRADIENT  # came and went: it only passed through
    return storage.kind
