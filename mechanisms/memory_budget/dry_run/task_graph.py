"""The task and data flow graph of a profiled step (moDNN, section 3.2), with sizes as functions of the batch size."""

from __future__ import annotations

from retime.mechanisms.memory_budget.dry_run.profile import Size, StepProfile
from retime.mechanisms.memory_budget.dry_run.trace import FOREVER, TracedStorage
from retime.schedules.budget import STAYS, Block, BlockKind, GraphTask, TaskGraph
from retime.schedules.errors import ScheduleError


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
            if fixed < 0 or slope < 0 or abs(fixed + slope * profile.samples - got) > _tolerance(got):
                sizes = ", ".join(f"{p.trace.storages[index].nbytes} at {p.samples}" for p in profiles)
                made = first.trace.operations[low.born].layer if low.born >= 0 else "before the step"
                raise ScheduleError(f"a storage made in {made} does not grow by the sample: bytes {sizes}")
        name = f"{_letter(_kind(low))}{index}"
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
                    f"{position} is {two.name} in {two.layer}, not {one.name} in {one.layer}"
                )
        counts = len(first.trace.operations), len(other.trace.operations)
        if counts[0] != counts[1]:
            raise ScheduleError(
                f"the step runs {counts[1]} operations with {other.samples} samples, "
                f"but {counts[0]} with {first.samples}"
            )


def _kind(storage: TracedStorage) -> BlockKind:
    if storage.kind in STAYS and storage.born >= 0 and storage.dies != FOREVER:
        return BlockKind.GRADIENT  # came and went: it only passed through
    return storage.kind


def _letter(kind: BlockKind) -> str:
    return {
        BlockKind.INPUT: "x",
        BlockKind.ACTIVATION: "a",
        BlockKind.GRADIENT: "g",
        BlockKind.WEIGHT: "w",
        BlockKind.WEIGHT_GRADIENT: "dw",
        BlockKind.STATE: "s",
    }[kind]


def _tolerance(nbytes: int) -> float:
    return max(512.0, 1e-6 * nbytes)
