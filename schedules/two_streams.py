"""Two streams on one device: weight gradients beside the critical path (Oh et al. 2022, section 4.1).

The *main-stream* runs what the step waits for, the output gradients and the next forward pass; the *sub-stream* runs
weight gradients and updates. The main-stream is cut into *regions* of alike layers, once for the backward and once for
the forward pass. Which weight gradient runs beside which region is what :func:`joint_schedule` decides (Algorithm 1);
:func:`joint_schedule_within` adds the rule for memory. Times and speedups are profiled, or counted by
:func:`retime.schedules.profile_regions`.

Text form: a region a line, its main-stream, a bar, and its sub-stream::

    R1: O4 O3 | W4
    R2: O2 W1 U1 | W3 U4 U3
    R3: F1' F2' | W2 U2
    R4: F3' F4'

As in the rest of this package ``O_1``, the gradient of the batch, is left out; the step begins with the gradient of the
loss, ``O_{L+1}``, at time zero, and ends with the next step's forward pass (section 2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from retime.schedules.errors import ScheduleError, check_count, mark
from retime.schedules.schedule import Kind, Needs, Schedule, Task, dependencies, validate
from retime.schedules.simulate import Buffer, Sizes, Timeline, simulate, size_of, step_buffers

MAIN, SUB = "main", "sub"
"""The names of the two lanes."""


@dataclass(frozen=True)
class Region:
    """A stretch of the main-stream whose layers compute alike, such as one block's backward pass: ``R[i]``.

    Args:
        name: for texts, such as ``"R1"``; no colon, bar or white space.
        tasks: in the order they run; at least one.

    Raises:
        ScheduleError: when the name could not be read back, or there is no task.
    """

    name: str
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if not self.name or any(character in ":|" or character.isspace() for character in self.name):
            raise ScheduleError(f"region name {self.name!r}: give one without colons, bars and white space, as in 'R1'")
        if not self.tasks:
            raise ScheduleError(f"region {self.name} has no main-stream task: join it with its neighbour")


@dataclass(frozen=True)
class TwoStreamSchedule:
    """The main-stream in regions, and what the sub-stream runs beside each: ``S[1..N]``.

    A stream runs its tasks one after another, so no two weight gradients overlap, the constraint that section 4.1 adds.
    What stands beside a region starts once the region before has ended; the streams wait for each other only there
    and where a task needs another. ``TwoStreamSchedule.parse(str(plan)) == plan``.

    Args:
        regions: ``R[1..N]``, in the order they run, with distinct names.
        sub: the sub-stream's tasks, region by region.

    Raises:
        ScheduleError: when the numbers of regions differ, or two regions share a name.
    """

    regions: tuple[Region, ...]
    sub: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        if len(self.sub) != len(self.regions):
            raise ScheduleError(
                f"{len(self.regions)} regions have {len(self.sub)} lists of sub-stream tasks: give one a region, "
                "an empty one where the sub-stream has nothing to do"
            )
        names = [region.name for region in self.regions]
        for name in names:
            if names.count(name) > 1:
                raise ScheduleError(f"region {name} is given {names.count(name)} times: name each region differently")

    @property
    def schedule(self) -> Schedule:
        """The two lanes, ``main`` and ``sub``."""
        main = [task for region in self.regions for task in region.tasks]
        return Schedule.from_lanes({MAIN: main, SUB: [task for tasks in self.sub for task in tasks]})

    @property
    def needs(self) -> Needs:
        """Needs of each task: :func:`dependencies`, and on the sub-stream the end of the region before its own."""
        needs = {task: list(wanted) for task, wanted in dependencies(self.schedule).items()}
        for before, tasks in zip(self.regions, self.sub[1:], strict=False):
            for task in tasks[:1]:
                needs[task].append(before.tasks[-1])
        return needs

    @classmethod
    def parse(cls, text: str) -> TwoStreamSchedule:
        """Read a plan from its text form.

        Raises:
            ScheduleError: when a line is no region or a word no task; the message repeats it.
        """
        regions, sub = [], []
        for line in filter(str.strip, text.splitlines()):
            name, colon, words = line.partition(":")
            if not colon or words.count("|") > 1:
                raise ScheduleError(
                    f"cannot read line {line.strip()!r}: a region is a name, a colon, its main-stream tasks and, "
                    "behind a bar, those of the sub-stream, as in 'R1: O4 O3 | W4'"
                )
            main_words, _, sub_words = words.partition("|")
            regions.append(Region(name.strip(), Schedule.parse(main_words).tasks))
            sub.append(Schedule.parse(sub_words).tasks)
        return cls(tuple(regions), tuple(sub))

    def __str__(self) -> str:
        lines = []
        for region, tasks in zip(self.regions, self.sub, strict=True):
            beside = f" | {' '.join(map(str, tasks))}" if tasks else ""
            lines.append(f"{region.name}: {' '.join(map(str, region.tasks))}{beside}")
        return "\n".join(lines)


@dataclass(frozen=True)
class SubStreamTask:
    """A weight gradient and when it may run: section 4.1, step 3.

    Args:
        task: ``W_k``.
        first: index of the first region in which it may run: that of ``O_{k+1}``.
        ready_ms: from when on in that region; the end of ``O_{k+1}`` from the region's start, nothing else running.
        last: index of the last region: that of the next ``F_k``.
        due_ms: by when in that region; the start of ``F_k`` from the region's start.
    """

    task: Task
    first: int
    ready_ms: float
    last: int
    due_ms: float


@dataclass(frozen=True)
class Profile:
    """Measurements of section 4.1, step 1.

    Args:
        main_ms: each main-stream task alone; a region's sum is ``T_main(R[i])``.
        sub_ms: by weight gradient, its milliseconds beside each region in turn, ``T_sub(k, R[i])``, with its update.
        speedup: by weight gradient, how much faster it and each region in turn run together than one after the other.
    """

    main_ms: Mapping[Task, float]
    sub_ms: Mapping[Task, Sequence[float]]
    speedup: Mapping[Task, Sequence[float]]


def backward_and_forward_regions(blocks: Sequence[Collection[int]]) -> tuple[Region, ...]:
    """The main-stream of one backward and the next forward pass, a region a block and pass: ``R1`` to ``R2n``.

    ``W_1`` and its update stand on the main-stream: Algorithm 1 starts with ``W_2``, as nothing is left to hide ``W_1``
    behind before ``F_1`` needs it.

    >>> print(*(f"{r.name}: {' '.join(map(str, r.tasks))}" for r in backward_and_forward_regions([[1, 2], [3]])))
    R1: O3 R2: O2 W1 U1 R3: F1' F2' R4: F3'

    Args:
        blocks: the layers of each block, in forward order; together 1 to L.

    Raises:
        ScheduleError: when the blocks do not hold layers 1 to L in order.
    """
    layers = [layer for block in blocks for layer in block]
    if layers != list(range(1, len(layers) + 1)) or not all(blocks):
        raise ScheduleError(f"the blocks hold the layers {layers}: give 1 to L in order, at least one a block")
    backward = [[Task(Kind.O, layer) for layer in reversed(list(block)) if layer > 1] for block in reversed(blocks)]
    if layers:
        backward[-1] += [Task(Kind.W, 1), Task(Kind.U, 1)]
    forward = [[Task(Kind.F, layer, step=1) for layer in block] for block in blocks]
    return tuple(Region(f"R{number}", tuple(tasks)) for number, tasks in enumerate(backward + forward, 1))


def one_stream(regions: Sequence[Region], *, without_weights: Collection[int] = ()) -> TwoStreamSchedule:
    """The conventional order on the main-stream alone: ``W_i`` before ``O_i``, ``U_i`` behind both.

    Args:
        regions: such as :func:`backward_and_forward_regions` gives.
        without_weights: layers that have no parameters.
    """
    ordered = []
    for region in regions:
        tasks: list[Task] = []
        for task in region.tasks:
            if task.kind is Kind.O and task.layer not in without_weights:
                tasks += [Task(Kind.W, task.layer), task, Task(Kind.U, task.layer)]
            else:
                tasks.append(task)
        ordered.append(Region(region.name, tuple(tasks)))
    return TwoStreamSchedule(tuple(ordered), ((),) * len(ordered))


def sub_stream_tasks(
    regions: Sequence[Region], main_ms: Mapping[Task, float], *, without_weights: Collection[int] = ()
) -> tuple[SubStreamTask, ...]:
    """The schedulable interval of each weight gradient that is not on the main-stream, the last layer's first.

    Args:
        main_ms: milliseconds of each of its tasks alone.
        without_weights: layers that have no parameters.

    Raises:
        ScheduleError: when a time is missing, a layer's ``F`` or ``O`` is not in the regions, or one region has both.
    """
    begin: dict[Task, tuple[int, float]] = {}
    end: dict[Task, tuple[int, float]] = {}
    for index, region in enumerate(regions):
        now_ms = 0.0
        for task in region.tasks:
            if task not in main_ms:
                raise ScheduleError(f"main_ms has no duration for {task} of region {region.name}: add it")
            begin[task] = index, now_ms
            now_ms += main_ms[task]
            end[task] = index, now_ms
    last_layer = max((task.layer for task in begin if task.kind in (Kind.O, Kind.F)), default=0)
    sub_stream = []
    for layer in range(last_layer, 0, -1):
        task = Task(Kind.W, layer)
        if layer in without_weights or task in begin:
            continue
        output_gradient, forward = Task(Kind.O, layer + 1), Task(Kind.F, layer, step=1)
        if forward not in begin or (layer < last_layer and output_gradient not in end):
            missing = output_gradient if forward in begin else forward
            raise ScheduleError(f"{missing} is in no region, and {task} cannot be placed without it: add it")
        first, ready_ms = end[output_gradient] if layer < last_layer else (0, 0.0)
        last, due_ms = begin[forward]
        if first == last:
            name = regions[first].name
            raise ScheduleError(f"region {name} makes {task} ready and has {forward}: cut it between them")
        sub_stream.append(SubStreamTask(task, first, ready_ms, last, due_ms))
    return tuple(sub_stream)


def joint_schedule(
    regions: Sequence[Region],
    profile: Profile,
    *,
    prescheduled: int = 0,
    updates: bool = True,
    without_weights: Collection[int] = (),
) -> TwoStreamSchedule:
    """Multi-region joint scheduling: Algorithm 1, line by line.

    Where the printed lines leave a choice: of equal speedups the highest layer is taken, whose tensors have been kept
    the longest, and of equal regions the earliest. A region in which no weight gradient is runnable at ``now[i]`` sits
    the round out. If none has one, the clock closest to its region's next ready weight gradient moves there. What is
    left once the regions that may hold it are all full goes, by the same lines, to regions that line 11 has removed.

    Args:
        regions: ``R[1..N]``.
        profile: ``T_main``, ``T_sub`` and speedups.
        prescheduled: in so many regions at the beginning of the backward pass weight gradients run as soon as they are
            ready (section 4.1, the rule for memory); Algorithm 1 has the rest.
        updates: put ``U_k`` behind ``W_k``, or, where ``O_k`` still reads the weights, behind the weight gradients of
            the region that has ``O_k``.
        without_weights: layers that have no parameters.

    Raises:
        ScheduleError: when the profile has no entry for a task.
        ValueError: when ``prescheduled`` is no number of regions.
    """
    check_count(0, f" (none), to {len(regions)}", prescheduled=prescheduled)
    if prescheduled > len(regions):
        raise ValueError(f"prescheduled={prescheduled}: give 0 (none) to {len(regions)}, the number of regions")
    tasks = sub_stream_tasks(regions, profile.main_ms, without_weights=without_weights)
    for task in tasks:
        for name, table in (("sub_ms", profile.sub_ms), ("speedup", profile.speedup)):
            if len(table.get(task.task, ())) != len(regions):
                raise ScheduleError(f"{name} has no {len(regions)} values for {task.task}: give one a region")
    main_ms = [sum(profile.main_ms[task] for task in region.tasks) for region in regions]
    placed: list[list[Task]] = [[] for _ in regions]  # line 1: S[i] = []
    now_ms = [0.0] * len(regions)  # line 1: now[i] = 0
    for task in tasks:
        if task.first < prescheduled:
            placed[task.first].append(task.task)
    unplaced = [task for task in tasks if task.first >= prescheduled]  # line 2: U
    remaining = list(range(prescheduled, len(regions)))  # line 2: C
    while unplaced:  # line 3
        best: tuple[float, int, SubStreamTask] | None = None
        for i in remaining:  # line 4
            for task in unplaced:  # lines 5 and 6; tasks come from the last layer on
                p = profile.speedup[task.task][i]
                if (best is None or p > best[0]) and _runnable(task, i, now_ms[i], profile):
                    best = p, i, task  # line 7
        if best is None:
            remaining = _wait(unplaced, remaining, now_ms, main_ms, prescheduled)
            continue
        _, j, task = best  # line 8
        placed[j].append(task.task)  # line 9
        unplaced.remove(task)
        now_ms[j] += profile.sub_ms[task.task][j]  # line 10
        if now_ms[j] >= main_ms[j] and j in remaining:  # line 11
            remaining.remove(j)
    if updates:
        placed = _with_updates(regions, placed)
    return TwoStreamSchedule(tuple(regions), tuple(map(tuple, placed)))  # line 12


def _runnable(task: SubStreamTask, i: int, now_ms: float, profile: Profile) -> bool:
    if i == task.first and now_ms < task.ready_ms:
        return False
    if i == task.last:
        return now_ms + profile.sub_ms[task.task][i] <= task.due_ms
    return task.first <= i < task.last


def _wait(
    unplaced: list[SubStreamTask], remaining: list[int], now_ms: list[float], main_ms: list[float], prescheduled: int
) -> list[int]:
    """Move one clock to the next moment at which its region has something to run, or open full regions again."""
    waits = [(task.ready_ms - now_ms[task.first], task.first) for task in unplaced if task.first in remaining]
    if waits:
        wait_ms, i = min(waits)
        now_ms[i] += wait_ms
        now_ms[i] = max(now_ms[i], min(task.ready_ms for task in unplaced if task.first == i))  # sums of floats
        return remaining
    full = [i for i in range(prescheduled, len(now_ms)) if i not in remaining]
    for i in full:
        now_ms[i] = max(now_ms[i], main_ms[i])
    return sorted({*remaining, *full})


def _with_updates(regions: Sequence[Region], placed: list[list[Task]]) -> list[list[Task]]:
    region_of = {task: index for index, region in enumerate(regions) for task in region.tasks}
    behind: dict[int, list[Task]] = defaultdict(list)
    updated: list[list[Task]] = []
    for index, tasks in enumerate(placed):
        updated.append([])
        for task in tasks:
            updated[-1].append(task)
            update = Task(Kind.U, task.layer)
            reader = region_of.get(Task(Kind.O, task.layer), -1)
            (updated[-1] if reader < index else behind[reader]).append(update)
        updated[-1] += behind[index]
    return updated


def joint_schedule_within(
    max_bytes: int,
    regions: Sequence[Region],
    profile: Profile,
    buffers: Iterable[Buffer],
    *,
    updates: bool = True,
    without_weights: Collection[int] = (),
) -> TwoStreamSchedule:
    """Algorithm 1 within a number of bytes: pre-schedule k regions, re-run for the others, k growing from 0.

    Args:
        max_bytes: the most that the buffers may take at once; the paper allows 1.1 of the conventional execution.
        regions: ``R[1..N]``.
        profile: what :func:`joint_schedule` takes; memory follows from its times.
        buffers: what occupies memory, such as :func:`two_stream_buffers` gives.
        updates: as in :func:`joint_schedule`.
        without_weights: layers that have no parameters.

    Returns:
        The schedule of the smallest k that fits.

    Raises:
        ScheduleError: when none fits; the message says the least bytes that would do.
    """
    buffers = list(buffers)
    tasks = sub_stream_tasks(regions, profile.main_ms, without_weights=without_weights)
    most = max((task.first + 1 for task in tasks), default=0)  # beyond, every weight gradient runs once it is ready
    peaks = []
    for k in range(most + 1):
        plan = joint_schedule(regions, profile, prescheduled=k, updates=updates, without_weights=without_weights)
        peaks.append(profiled_timeline(plan, profile, buffers).peak_bytes)
        if peaks[-1] <= max_bytes:
            return plan
    raise ScheduleError(
        f"max_bytes={max_bytes}: the step takes at least {min(peaks)} bytes, with weight gradients as early as "
        f"possible in {peaks.index(min(peaks))} of {most} regions; give at least that, or make the batch smaller"
    )


def profiled_timeline(plan: TwoStreamSchedule, profile: Profile, buffers: Iterable[Buffer] = ()) -> Timeline:
    """Run a plan by the clocks of Algorithm 1: the main-stream as if alone, each weight gradient in its ``T_sub``.

    Args:
        plan: a schedule of these regions.
        profile: its times. Updates on the sub-stream take none, being part of ``T_sub``.
        buffers: what occupies memory.

    Raises:
        ScheduleError: when the plan cannot run, or a time is missing.
    """
    region_of = {task: index for index, tasks in enumerate(plan.sub) for task in tasks}

    def cost_ms(task: Task) -> float:
        if task not in region_of:
            if task not in profile.main_ms:
                raise ScheduleError(f"main_ms has no duration for {task}: add it")
            return profile.main_ms[task]
        if task.kind is Kind.U:
            return 0.0
        if len(profile.sub_ms.get(task, ())) != len(plan.regions):
            raise ScheduleError(f"sub_ms has no {len(plan.regions)} values for {task}: give one a region")
        return profile.sub_ms[task][region_of[task]]

    return simulate(plan.schedule, cost_ms, buffers=buffers, needs=plan.needs)


def two_stream_buffers(
    tasks: Iterable[Task],
    *,
    activation_bytes: Sizes = 0,
    output_gradient_bytes: Sizes = 0,
    weight_gradient_bytes: Sizes = 0,
    other_activation_bytes: Sizes = 0,
) -> list[Buffer]:
    """The buffers of a backward pass and the forward pass behind it, which a two-stream schedule has.

    As in :func:`step_buffers` layer i's input and its output gradient stay until ``O_i`` and ``W_i`` have read them
    (section 3). What the next forward pass keeps stays to the end.

    Args:
        tasks: of a plan, such as ``plan.schedule``; all plans of the same regions have the same buffers.
        activation_bytes: size of ``Y_t``, the output of layer t that ``W_{t+1}`` reads, by t.
        output_gradient_bytes: size of ``dY_i``, the result of ``O_i``, by i.
        weight_gradient_bytes: size of ``dW_i`` by i.
        other_activation_bytes: size of what ``F_i`` keeps for ``O_i`` alone, such as the input of a normalisation.
    """
    tasks = list(tasks)
    buffers = step_buffers(
        [task for task in tasks if task.step == 0],
        activation_bytes=activation_bytes,
        output_gradient_bytes=output_gradient_bytes,
        weight_gradient_bytes=weight_gradient_bytes,
    )
    for task in tasks:
        if task.kind is Kind.O:
            buffers.append(Buffer(f"X{task.layer}", size_of(other_activation_bytes, task.layer), used_by=(task,)))
        elif task.kind is Kind.F:
            kept_bytes = size_of(activation_bytes, task.layer) + size_of(other_activation_bytes, task.layer)
            buffers.append(Buffer(f"Y{task.layer}'", kept_bytes, (task,)))
    return [buffer for buffer in buffers if buffer.size_bytes]


def validate_two_streams(plan: TwoStreamSchedule, *, without_weights: Collection[int] = ()) -> None:
    """Check that each layer of the forward pass has its weight gradient once, in a region that suits, and all can run.

    >>> validate_two_streams(TwoStreamSchedule.parse("R1: O3 O2 | W2\\nR2: W1 F1' F2' F3'"))
    Traceback (most recent call last):
    retime.schedules.errors.ScheduleError: W3 is missing, and F3' needs it: put it beside R1 or a region up to R2

    Args:
        without_weights: layers that have no parameters.

    Raises:
        ScheduleError: at the first broken dependency; the message says where the task may go.
    """
    region_of = {task: index for index, region in enumerate(plan.regions) for task in region.tasks}
    names = [region.name for region in plan.regions]
    placed: dict[Task, int] = {}
    for index, tasks in enumerate(plan.sub):
        words = [str(task) for task in tasks]
        for position, task in enumerate(tasks):
            here = mark(words, position, prefix=f"{names[index]}: | ")
            if task.kind not in (Kind.W, Kind.U):
                raise ScheduleError(f"{task} is on the sub-stream, which has W and U: put it in a region\n{here}")
            placed[task] = index
            need = Task(Kind.O, task.layer + (task.kind is Kind.W))
            if region_of.get(need, 0) > index:
                to = names[region_of[need]]
                raise ScheduleError(f"{task} needs {need}, which runs in {to}: move {task} to {to} or later\n{here}")
            forward = Task(Kind.F, task.layer, step=1)
            if region_of.get(forward, index) < index:
                to = names[region_of[forward]]
                raise ScheduleError(f"{forward} of {to} needs {task}: move {task} to {to} or earlier\n{here}")
    for task, last in region_of.items():
        weight_gradient = Task(Kind.W, task.layer)
        if task.kind is not Kind.F or task.layer in without_weights:
            continue
        if weight_gradient not in placed and weight_gradient not in region_of:
            first = names[region_of.get(Task(Kind.O, task.layer + 1), 0)]
            raise ScheduleError(
                f"{weight_gradient} is missing, and {task} needs it: put it beside {first} or a region up to "
                f"{names[last]}"
            )
    validate(plan.schedule, plan.needs)
