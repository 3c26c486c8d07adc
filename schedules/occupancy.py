"""Two streams that share a device's thread blocks, or a processor's cores (Oh et al. 2022, sections 2 and 4.1).

:func:`retime.schedules.simulate` gives every lane a device of its own. Here a task is a row of kernels, a kernel a
number of thread blocks, and the device runs so many of them at once.

The model of contention:

- A kernel's thread blocks all take the same time, and as long whatever runs beside them. A device with a third of its
  blocks in use so has a third of its speed: gains are upper bounds where few blocks already fill a memory bus.
- A free place goes to the main-stream's waiting thread blocks first, and what it leaves to the sub-stream's. A thread
  block that runs is not interrupted, so the sub-stream can hold up the main-stream by the rest of its blocks.
- A stream runs one kernel at a time, and starts the next once all thread blocks have ended: the places that its last
  thread blocks leave free (*tail underutilization*), and the time in which a kernel is set up, only the other stream
  can use.
- Where issuing takes time, each stream has a thread that issues its kernels in order, ahead of the device.

For a processor a place is a core: two limits, ``main`` and ``sub``, are the threads that each stream may use.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from retime.schedules.errors import ScheduleError, check_count
from retime.schedules.schedule import Kind, Needs, Task, execution_order
from retime.schedules.simulate import Buffer, Timeline, timeline_of
from retime.schedules.two_streams import MAIN, SUB, Profile, Region, TwoStreamSchedule, sub_stream_tasks

_SAME_MS = 1e-9  # sums of floats that should be equal differ by less


@dataclass(frozen=True)
class Kernel:
    """A launch on the device.

    Args:
        thread_blocks: how many, at least 1; for a processor, into how many pieces the work may be cut.
        block_ms: milliseconds that each takes.

    Raises:
        ValueError: when a number is out of its range.
    """

    thread_blocks: int
    block_ms: float

    def __post_init__(self) -> None:
        check_count(thread_blocks=self.thread_blocks)
        _check_ms(block_ms=self.block_ms)


@dataclass(frozen=True)
class Device:
    """Device that two streams share.

    Args:
        capacity: thread blocks that run at once, or cores.
        main: the most that the main-stream has at once; ``None`` for all.
        sub: the same for the sub-stream.
        setup_ms: milliseconds between a stream's kernels, in which it runs nothing (kernel execution overhead).
        issue_ms: milliseconds in which a stream's thread issues one kernel (kernel issue overhead); 0 for a sequence
            that is compiled before (section 4.2).

    Raises:
        ValueError: when a number is out of its range.
    """

    capacity: int
    main: int | None = None
    sub: int | None = None
    setup_ms: float = 0.0
    issue_ms: float = 0.0

    def __post_init__(self) -> None:
        check_count(capacity=self.capacity)
        for name, limit in (("main", self.main), ("sub", self.sub)):
            if limit is not None:
                check_count(1, ", or None for the capacity", **{name: limit})
                if limit > self.capacity:
                    raise ValueError(f"{name}={limit}: give at most capacity={self.capacity}")
        _check_ms(setup_ms=self.setup_ms, issue_ms=self.issue_ms)

    def limit(self, stream: str) -> int:
        """The most thread blocks of ``"main"`` or ``"sub"`` at once."""
        limit = self.main if stream == MAIN else self.sub
        return self.capacity if limit is None else limit

    def alone_ms(self, kernel: Kernel, stream: str = MAIN) -> float:
        """Milliseconds of a kernel that has the device for itself: its waves, and setting it up."""
        return math.ceil(kernel.thread_blocks / self.limit(stream)) * kernel.block_ms + self.setup_ms


Kernels = Mapping[Task, Sequence[Kernel]] | Callable[[Task], Sequence[Kernel]]
"""The kernels of a task, in the order they run."""


@dataclass(frozen=True)
class RegionRun:
    """One region of a simulated plan.

    Args:
        name: of the region.
        start_ms: when its first main-stream task starts; 0 for the first region.
        end_ms: when the next region starts, or the plan ends.
        sequential_ms: what ran in between, one kernel after the other: the main-stream's tasks, and of those of the
            sub-stream the share that ran in this time, each alone.
        speedup: ``sequential_ms`` over the time it took; 1 for no time.
    """

    name: str
    start_ms: float
    end_ms: float
    sequential_ms: float
    speedup: float


@dataclass(frozen=True)
class TwoStreamTimeline:
    """Result of :func:`simulate_two_streams`.

    Args:
        timeline: spans, times and memory; a span includes setting up the task's kernels. ``busy_ms`` is a stream's time
            with a kernel set up or running.
        occupancy: the curve, as (milliseconds, the main-stream's thread blocks, the sub-stream's) from then on.
        idle_share: of the device's places, over the makespan.
        sequential_ms: all kernels one after another.
        regions: region by region.
    """

    timeline: Timeline
    occupancy: tuple[tuple[float, int, int], ...] = field(repr=False)
    idle_share: float
    sequential_ms: float
    regions: tuple[RegionRun, ...]

    @property
    def makespan_ms(self) -> float:
        """Time at which the last task ends."""
        return self.timeline.makespan_ms


def simulate_two_streams(
    plan: TwoStreamSchedule, kernels: Kernels, device: Device, *, buffers: Iterable[Buffer] = ()
) -> TwoStreamTimeline:
    """Run a plan on a device, thread block by thread block.

    Args:
        plan: which task on which stream; :func:`retime.schedules.one_stream` gives the conventional one.
        kernels: of each task; none for a task that takes no time.
        device: places and overheads.
        buffers: what occupies memory.

    Raises:
        ScheduleError: when the plan cannot run, a task's kernels are missing, or a buffer names a task that the plan
            does not have.
    """
    execution_order(plan.schedule, plan.needs)  # names what cannot run
    lanes = {lane.name: lane.tasks for lane in plan.schedule.lanes}
    of = {task: _kernels(kernels, task) for task in plan.schedule}
    run = _Run(lanes, plan.needs, of, device)
    busy_ms = {lane: sum(run.end_ms[task] - run.start_ms[task] for task in tasks) for lane, tasks in lanes.items()}
    timeline = timeline_of(plan.schedule, run.start_ms, run.end_ms, busy_ms, buffers)
    alone_ms = {task: _alone_ms(of[task], device, lane) for lane, tasks in lanes.items() for task in tasks}
    used_ms = sum(piece.places * (piece.end_ms - piece.start_ms) for piece in run.pieces)
    return TwoStreamTimeline(
        timeline=timeline,
        occupancy=tuple(_occupancy(run.pieces)),
        idle_share=1.0 - used_ms / (device.capacity * timeline.makespan_ms) if timeline.makespan_ms else 0.0,
        sequential_ms=sum(alone_ms.values()),
        regions=tuple(_region_runs(plan, run, alone_ms, timeline.makespan_ms)),
    )


def profile_regions(regions: Sequence[Region], kernels: Kernels, device: Device) -> Profile:
    """Count what section 4.1, step 1 measures: each pair of a region and a block's weight gradients run together.

    The weight gradients of a block are those whose ``O`` stand in one backward region. All of them start with the
    region; what is left when the region has ended runs alone, and so do the milliseconds that are noted for it.

    Args:
        regions: the main-stream.
        kernels: of each task of it, and of each ``W_k`` and, where there are any, ``U_k``.
        device: places and overheads; kernels count as issued.

    Raises:
        ScheduleError: when a task's kernels are missing.
    """
    device = Device(device.capacity, device.main, device.sub, device.setup_ms)
    of = {task: _kernels(kernels, task) for region in regions for task in region.tasks}
    main_ms = {task: _alone_ms(its, device, MAIN) for task, its in of.items()}
    region_of = {task: index for index, region in enumerate(regions) for task in region.tasks}
    groups: dict[int, list[Task]] = defaultdict(list)
    last_layer = max((task.layer for task in of), default=0)
    for sub_task in sub_stream_tasks(regions, main_ms, without_weights=_without_kernels(kernels, last_layer)):
        task = sub_task.task
        groups[region_of.get(Task(Kind.O, task.layer), sub_task.first)].append(task)
        of[task] = (*_kernels(kernels, task), *_kernels(kernels, Task(Kind.U, task.layer), optional=True))
    sub_ms: dict[Task, list[float]] = {}
    speedup: dict[Task, list[float]] = {}
    for tasks in groups.values():
        alone_ms = {task: _alone_ms(of[task], device, SUB) for task in tasks}
        for region in regions:
            run = _Run({MAIN: region.tasks, SUB: tasks}, {}, of, device)
            sequential_ms = sum(main_ms[task] for task in region.tasks) + sum(alone_ms.values())
            together_ms = max(run.end_ms.values())
            for task in tasks:
                sub_ms.setdefault(task, []).append(run.end_ms[task] - run.start_ms[task])
                speedup.setdefault(task, []).append(sequential_ms / together_ms if together_ms else 1.0)
    return Profile(main_ms, sub_ms, speedup)


@dataclass(frozen=True)
class _Piece:
    """Thread blocks of one kernel that run together."""

    start_ms: float
    end_ms: float
    places: int
    stream: str
    task: Task


class _Stream:
    """State of a stream: the kernel that it sets up or runs, and what is left of it."""

    def __init__(self, name: str, tasks: Sequence[Task], kernels: Mapping[Task, Sequence[Kernel]], device: Device):
        self.name, self.limit = name, device.limit(name)
        self._tasks, self._kernels, self._device = tasks, kernels, device
        self._task, self._kernel, self._issued = 0, 0, 0
        self.ready_ms = math.inf  # when the kernel is set up
        self.waiting = self.running = 0  # its thread blocks
        self.kernel: Kernel | None = None

    @property
    def task(self) -> Task | None:
        return self._tasks[self._task] if self._task < len(self._tasks) else None

    def start(self, now_ms: float, may_run: Callable[[Task], bool], run: _Run) -> bool:
        """Start the next kernel, or end a task that has no more; whether something changed."""
        task = self.task
        if task is None or self.kernel is not None:
            return False
        if self._kernel == 0 and task not in run.start_ms:
            if not may_run(task):
                return False
            kernels = self._kernels[task]
            issued_ms = (self._issued + 1) * self._device.issue_ms if kernels else 0.0
            run.start_ms[task] = max(now_ms, issued_ms)
        if self._kernel == len(self._kernels[task]):
            run.end_ms[task] = now_ms
            self._task, self._kernel = self._task + 1, 0
            return True
        self.kernel = self._kernels[task][self._kernel]
        self._kernel += 1
        self._issued += 1
        self.ready_ms = max(now_ms, self._issued * self._device.issue_ms) + self._device.setup_ms
        self.waiting = self.kernel.thread_blocks
        return True

    def place(self, now_ms: float, free: int) -> int:
        """Return how many waiting thread blocks start now."""
        if self.kernel is None or self.ready_ms > now_ms + _SAME_MS:
            return 0
        count = min(self.waiting, free, self.limit - self.running)
        self.waiting -= count
        self.running += count
        return count

    def ended(self, count: int) -> None:
        """Take back places; a kernel without thread blocks left has ended."""
        self.running -= count
        if not self.waiting and not self.running:
            self.kernel, self.ready_ms = None, math.inf


class _Run:
    """Streams of tasks, from a device with all places free to the end of the last task."""

    def __init__(
        self,
        lanes: Mapping[str, Sequence[Task]],
        needs: Needs,
        kernels: Mapping[Task, Sequence[Kernel]],
        device: Device,
    ) -> None:
        self.start_ms: dict[Task, float] = {}
        self.end_ms: dict[Task, float] = {}
        self.pieces: list[_Piece] = []
        self._needs = needs
        streams = [_Stream(name, lanes.get(name, ()), kernels, device) for name in (MAIN, SUB)]  # in priority's order
        free, now_ms = device.capacity, 0.0
        ends: list[tuple[float, int, int]] = []  # when thread blocks end, which stream's, how many
        while True:
            while sum(stream.start(now_ms, self._may_run, self) for stream in streams):
                pass
            for index, stream in enumerate(streams):
                if count := stream.place(now_ms, free):
                    assert stream.kernel is not None
                    assert stream.task is not None
                    end_ms = now_ms + stream.kernel.block_ms
                    free -= count
                    heapq.heappush(ends, (end_ms, index, count))
                    self.pieces.append(_Piece(now_ms, end_ms, count, stream.name, stream.task))
            next_ms = [stream.ready_ms for stream in streams if stream.ready_ms > now_ms + _SAME_MS]
            next_ms = [moment for moment in next_ms if moment < math.inf] + [moment for moment, _, _ in ends[:1]]
            if not next_ms:
                break
            now_ms = min(next_ms)
            while ends and ends[0][0] <= now_ms + _SAME_MS:
                _, index, count = heapq.heappop(ends)
                free += count
                streams[index].ended(count)

    def _may_run(self, task: Task) -> bool:
        return all(need in self.end_ms for need in self._needs.get(task, ()))


def _region_runs(
    plan: TwoStreamSchedule, run: _Run, alone_ms: Mapping[Task, float], makespan_ms: float
) -> Iterator[RegionRun]:
    starts = [run.start_ms[region.tasks[0]] for region in plan.regions]
    edges = [0.0, *starts[1:], makespan_ms]
    sub = [piece for piece in run.pieces if piece.stream == SUB]
    work: dict[Task, float] = defaultdict(float)
    for piece in sub:
        work[piece.task] += piece.places * (piece.end_ms - piece.start_ms)
    for region, start_ms, end_ms in zip(plan.regions, edges, edges[1:], strict=False):
        sequential_ms = sum(alone_ms[task] for task in region.tasks)
        for piece in sub:
            inside_ms = min(piece.end_ms, end_ms) - max(piece.start_ms, start_ms)
            if inside_ms > 0:
                sequential_ms += alone_ms[piece.task] * piece.places * inside_ms / work[piece.task]
        took_ms = end_ms - start_ms
        yield RegionRun(region.name, start_ms, end_ms, sequential_ms, sequential_ms / took_ms if took_ms else 1.0)


def _occupancy(pieces: Iterable[_Piece]) -> Iterator[tuple[float, int, int]]:
    changes: dict[float, dict[str, int]] = defaultdict(lambda: {MAIN: 0, SUB: 0})
    for piece in pieces:
        changes[piece.start_ms][piece.stream] += piece.places
        changes[piece.end_ms][piece.stream] -= piece.places
    main = sub = 0
    for moment_ms in sorted(changes):
        before = main, sub
        main, sub = main + changes[moment_ms][MAIN], sub + changes[moment_ms][SUB]
        if (main, sub) != before:
            yield moment_ms, main, sub


def _alone_ms(kernels: Iterable[Kernel], device: Device, stream: str) -> float:
    return sum(device.alone_ms(kernel, stream) for kernel in kernels)


def _kernels(kernels: Kernels, task: Task, *, optional: bool = False) -> tuple[Kernel, ...]:
    if callable(kernels):
        return tuple(kernels(task))
    if task not in kernels and not optional:
        raise ScheduleError(f"kernels has none for {task}: add a list, an empty one for a task that takes no time")
    return tuple(kernels.get(task, ()))


def _without_kernels(kernels: Kernels, last_layer: int) -> list[int]:
    layers = range(1, last_layer + 1)
    return [layer for layer in layers if not _kernels(kernels, Task(Kind.W, layer), optional=True)]


def _check_ms(**durations: float) -> None:
    for name, value in durations.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value}: give 0 or more milliseconds")
