"""Data transfer scheduling and algorithm selection inside a budget: Algorithm 1 of moDNN (section 5.2).

Behind the algorithm stand its three decisions: which blocks leave to make room (section 5.2.1), which algorithm a task
runs by (5.2.3), and when blocks come back, if that is of use (5.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from retime.schedules.budget import TaskGraph
from retime.schedules.errors import ScheduleError
from retime.schedules.modnn.bounds import NEVER, SizedAlgorithm, require_floor, size_graph
from retime.schedules.modnn.device import WORKSPACE, Device, OffloadSchedule, RunLog
from retime.schedules.modnn.resources import Segment, offload_runs


@dataclass(frozen=True)
class Techniques:
    """Parts of the scheduling that are on.

    Args:
        algorithms: ``"gain"`` chooses by Eq. 10; ``"fastest"`` takes the fastest for which memory can be had, as vDNN
            does; ``"baseline"`` always takes the first.
        prefetch_backlog: whether a prefetch starts, too, when a task further on would be late because the copies before
            its own take long: between layers with much data and little arithmetic, Eq. 9, which looks at one task,
            starts them one by one and late. ``False`` is the paper's rule.
        spare_unused: whether a block that no task has used since it was made stays whatever happens, as in the paper.
            Off, such blocks leave before a defragmentation would move everything: a mask that the forward pass writes
            for the backward pass alone would otherwise lie there all the time.

    Raises:
        ScheduleError: unknown ``algorithms``.
    """

    algorithms: str = "gain"
    prefetch_backlog: bool = True
    spare_unused: bool = False

    def __post_init__(self) -> None:
        if self.algorithms not in ("gain", "fastest", "baseline"):
            raise ScheduleError(f"algorithms={self.algorithms!r} must be 'gain', 'fastest' or 'baseline'")

    @classmethod
    def paper(cls) -> Techniques:
        """Algorithm 1 by the paper's rules alone; copies already queued still count in Eq. 9, see :func:`is_due`."""
        return cls(prefetch_backlog=False, spare_unused=True)


def offload_schedule(
    graph: TaskGraph,
    samples: int,
    budget_bytes: int,
    bandwidth_bytes_per_ms: float,
    techniques: Techniques | None = None,
    *,
    update: bool = True,
) -> OffloadSchedule:
    """Simulate one round of ``samples`` inside ``budget_bytes`` and return what it did.

    Args:
        graph: the step's tasks, in order, and blocks.
        samples: the sub-batch size.
        budget_bytes: for everything, what stays on the device included.
        bandwidth_bytes_per_ms: of the transfers, either way.
        techniques: see :class:`Techniques`.
        update: ``False`` leaves out the weight updates, as in all rounds of a batch but the last.

    Raises:
        BudgetError: some task does not fit (Eq. 6 for ``samples``).
        ScheduleError: a bandwidth that is not above 0.
    """
    if not bandwidth_bytes_per_ms > 0:
        raise ScheduleError(f"bandwidth_bytes_per_ms={bandwidth_bytes_per_ms} must be above 0")
    require_floor(graph, samples, budget_bytes, splitting=False)
    return _Scheduler(graph, samples, budget_bytes, bandwidth_bytes_per_ms, techniques or Techniques(), update).run()


class _Scheduler:
    """Algorithm 1; the numbers in comments are its lines."""

    def __init__(
        self, graph: TaskGraph, samples: int, budget_bytes: int, bandwidth: float, techniques: Techniques, update: bool
    ) -> None:
        self.sized = size_graph(graph, samples, update=update)
        self.device = Device(self.sized, budget_bytes - self.sized.resident_bytes, bandwidth)
        self.techniques = techniques
        self.log = RunLog(self.sized, budget_bytes)
        self.now_ms = 0.0  # 1: T

    def run(self) -> OffloadSchedule:
        for task in range(len(self.sized.tasks)):  # 2
            before_ms = self.now_ms
            self._prepare(task)
            choice = self._choose(task)
            self.log.stalled(task, self.now_ms - before_ms)
            prefetch(self.device, task, self.now_ms, self.now_ms + choice.algorithm.ms, self.techniques)
            self._execute(task, choice)
        return self.log.result(self.device, self.now_ms)

    def _prepare(self, task: int) -> None:
        """Lines 3-8: memory for inputs and outputs, and the inputs into it."""
        device, sized = self.device, self.sized
        missing = [block for block in sized.needs[task] if device.segment[block] is None]
        room_ms: dict[int, float] = {}
        for block in (*missing, *sized.makes[task]):
            claimed_ms = allocate(
                device, block, self.now_ms, needed_until=task, spare_unused=self.techniques.spare_unused
            )
            if claimed_ms is None:
                self._defragment(task)
                return
            device.next_use[block] = task
            room_ms[block] = claimed_ms
        for block in missing:
            device.fetch(block, max(self.now_ms, room_ms[block]))
        arrivals_ms = [device.ready_ms[block] for block in sized.needs[task]]
        self.now_ms = max([self.now_ms, *arrivals_ms, *room_ms.values()])

    def _defragment(self, task: int) -> None:
        """Offload everything, then load what ``task`` needs: the working set then lies in one piece."""
        device, sized = self.device, self.sized
        self.log.defragmented(task)
        empty_ms = device.offload_all(self.now_ms)
        for block in (*sized.needs[task], *sized.makes[task]):
            if device.allocate(block, empty_ms) is None:
                raise AssertionError(f"task {sized.tasks[task].name!r} fits, but not after a defragmentation")
            device.next_use[block] = task
        for block in sized.needs[task]:
            device.fetch(block, empty_ms)
        self.now_ms = max([empty_ms, *(device.ready_ms[block] for block in sized.needs[task])])

    def _choose(self, task: int) -> Choice:
        """Lines 9-14: the algorithm, and memory for its workspace."""
        choice = choose_algorithm(self.device, task, self.now_ms, self.techniques)
        if choice is None:
            self._defragment(task)
            choice = choose_algorithm(self.device, task, self.now_ms, self.techniques, any_will_do=True)
        if choice is None:
            raise AssertionError(f"task {self.sized.tasks[task].name!r} fits, but has no room for its workspace")
        for block in choice.scheme.blocks if choice.scheme else ():
            self.device.offload(block, self.now_ms)
        if choice.algorithm.workspace_bytes:
            segment = self.device.pool.allocate(choice.algorithm.workspace_bytes, WORKSPACE)
            assert segment is not None
            self.now_ms = self.device.vacated_ms(segment.offset, segment.end, self.now_ms)
            choice.segment = segment
        return choice

    def _execute(self, task: int, choice: Choice) -> None:
        """Lines 28-31: run the task, then free what no task uses any more."""
        start_ms, end_ms = self.now_ms, self.now_ms + choice.algorithm.ms
        self.device.write(task, start_ms, end_ms)
        self.device.finish(task, start_ms, end_ms, choice.segment)
        self.log.ran(task, start_ms, end_ms, choice.algorithm)
        self.now_ms = end_ms


@dataclass(frozen=True)
class Scheme:
    """Neighbouring blocks that leave together.

    Args:
        blocks: by address.
        delay_ms: how much later than asked for their memory is free.
    """

    blocks: tuple[int, ...]
    delay_ms: float


def allocate(
    device: Device, block: int, now_ms: float, *, needed_until: int, spare_unused: bool = True
) -> float | None:
    """Reserve memory for a block, for which others leave where it is full; the arguments are :func:`find_scheme`'s.

    Returns:
        From when on it may be written; ``None`` when there is no scheme.
    """
    room_ms = device.allocate(block, now_ms)
    if room_ms is None:
        size = device.sized.sizes[block]
        scheme = find_scheme(device, size, now_ms, needed_until=needed_until, spare_unused=spare_unused)
        if scheme is None:
            return None
        for leaving in scheme.blocks:
            device.offload(leaving, now_ms)
        room_ms = device.allocate(block, now_ms)
    return room_ms


def find_scheme(
    device: Device, size: int, now_ms: float, *, needed_until: int, spare_unused: bool = True
) -> Scheme | None:
    """The offloading scheme of least delay.

    The paper does not say which of several schemes without delay it takes. Here the one whose blocks are used again
    last wins, then the one that copies fewer bytes, then the lower address.

    Args:
        size: bytes wanted in one piece.
        needed_until: blocks used again by this task or an earlier one stay: criterion 2, Figure 5.
        spare_unused: keep to criterion 1, by which a block stays that no task has used since it was made or fetched.
            Otherwise these leave, too, where there is no scheme without them; blocks still on their way never do.

    Returns:
        ``None`` when no run of blocks that may leave is large enough.
    """
    scheme = _least_delay(device, size, now_ms, needed_until, unused_too=False)
    if scheme is None and not spare_unused:
        scheme = _least_delay(device, size, now_ms, needed_until, unused_too=True)
    return scheme


def _least_delay(device: Device, size: int, now_ms: float, needed_until: int, *, unused_too: bool) -> Scheme | None:
    unused, next_use, ready_ms = device.unused, device.next_use, device.ready_ms

    def movable(block: int) -> bool:
        if block < 0 or next_use[block] <= needed_until:
            return False
        return block not in unused or (unused_too and ready_ms[block] <= now_ms)

    segments = list(device.pool.segments())
    device.pool.steps += len(segments)
    copy_ms = [_copy_ms(device, segment) for segment in segments]
    copied_ms = list(accumulate(copy_ms, initial=0.0))
    uses = [NEVER if segment.owner is None or segment.owner < 0 else next_use[segment.owner] for segment in segments]
    complete_ms = [
        ready_ms[segment.owner] if ms and segment.owner is not None else 0.0
        for segment, ms in zip(segments, copy_ms, strict=True)
    ]
    idle_ms = device.lane.free_ms

    best: tuple[float, int, float, int] | None = None
    chosen: tuple[int, int, float] | None = None
    for first, stop in offload_runs(segments, size, movable):
        moving_ms = copied_ms[stop] - copied_ms[first] if any(copy_ms[first:stop]) else 0.0
        order = (-min(uses[first:stop]), moving_ms, first)
        if best is not None and best[0] <= 0 and best[1:] <= order:
            continue  # no delay is less than none, so the exact one need not be worked out
        gone_ms = now_ms
        # Behind all other copies and done by now: then no gap has to be searched.
        if moving_ms and max(idle_ms, *complete_ms[first:stop]) + moving_ms > now_ms:
            gone_ms = _gone_ms(device, segments[first:stop], now_ms)
        gone_ms = device.vacated_ms(segments[first].offset, segments[stop - 1].end, gone_ms)
        key = (gone_ms - now_ms, *order)
        if best is None or key < best:
            best, chosen = key, (first, stop, gone_ms)
    if chosen is None:
        return None
    first, stop, gone_ms = chosen
    blocks = tuple(segment.owner for segment in segments[first:stop] if segment.owner is not None)
    return Scheme(blocks, gone_ms - now_ms)


def _copy_ms(device: Device, segment: Segment) -> float:
    block = segment.owner
    return 0.0 if block is None or block < 0 or device.on_host[block] else device.copy_ms[block]


def _gone_ms(device: Device, run: list[Segment], now_ms: float) -> float:
    blocks = [segment.owner for segment in run if segment.owner is not None and _copy_ms(device, segment)]
    requests = [(device.ready_ms[block], device.copy_ms[block]) for block in blocks]
    starts_ms = device.lane.place(requests)
    ends_ms = (start_ms + duration_ms for start_ms, (_, duration_ms) in zip(starts_ms, requests, strict=True))
    return max([now_ms, *ends_ms])


@dataclass
class Choice:
    """An algorithm and what has to leave for its workspace.

    Args:
        scheme: what makes room; ``None`` where there is room.
        gain_ms: Eq. 10.
        segment: the workspace, once allocated.
    """

    algorithm: SizedAlgorithm
    scheme: Scheme | None
    gain_ms: float
    segment: Segment | None = None


def choose_algorithm(
    device: Device, task: int, now_ms: float, techniques: Techniques, *, any_will_do: bool = False
) -> Choice | None:
    """The algorithm for ``task``, whose inputs and outputs are in place.

    Args:
        now_ms: when its inputs are there.
        techniques: how to choose, and when the prefetches start that a workspace may hold up.
        any_will_do: where the baseline has no room, take another: after a defragmentation there is none to be had.

    Returns:
        ``None`` when there is memory for no algorithm, not even by offloading.
    """
    how, options = techniques.algorithms, device.sized.algorithms[task]
    if how == "baseline" and not any_will_do:
        options = options[:1]
    choices = [choice for option in options if (choice := _consider(device, task, now_ms, option, techniques))]
    if how == "baseline":
        return choices[0] if choices else None
    if how == "fastest":
        return min(choices, key=lambda choice: (choice.algorithm.ms, choice.algorithm.workspace_bytes), default=None)
    return max(choices, key=lambda choice: (choice.gain_ms, -choice.algorithm.workspace_bytes), default=None)


def _consider(
    device: Device, task: int, now_ms: float, option: SizedAlgorithm, techniques: Techniques
) -> Choice | None:
    base_ms = device.sized.algorithms[task][0].ms
    size = option.workspace_bytes
    if not size:
        return Choice(option, None, base_ms - option.ms)
    segment, scheme = device.pool.find(size), None
    if segment:
        offload_ms = device.vacated_ms(segment.offset, segment.offset + size, now_ms) - now_ms
    else:
        scheme = find_scheme(device, size, now_ms, needed_until=task, spare_unused=techniques.spare_unused)
        if scheme is None:
            return None
        offload_ms = scheme.delay_ms
    delayed_ms = _delayed_prefetch_ms(device, task, now_ms, option, techniques, fits=scheme is None)
    return Choice(option, scheme, base_ms - option.ms - offload_ms - delayed_ms)


def _delayed_prefetch_ms(
    device: Device, task: int, now_ms: float, option: SizedAlgorithm, techniques: Techniques, *, fits: bool
) -> float:
    """T_pre of Eq. 10: the transfers for the nearest task that needs some and for which the workspace takes the room.

    Only those count that are due before ``task`` runs. They wait until it ends, so they cannot be held up for longer
    than it runs.
    """
    later = device.next_fetch()
    if later is None or not is_due(device, task, now_ms + option.ms, techniques):
        return 0.0
    blocks = _missing(device, later)
    sizes = [device.sized.sizes[block] for block in blocks]
    without = device.pool.would_fit(sizes)
    # A workspace that first needs others to leave finds the memory full: nothing fits beside it.
    beside = device.pool.would_fit([option.workspace_bytes, *sizes])[1:] if fits else [False] * len(sizes)
    held_up = [block for block, before, after in zip(blocks, without, beside, strict=True) if before and not after]
    return min(option.ms, sum(device.copy_ms[block] for block in held_up))


def prefetch(device: Device, task: int, now_ms: float, end_ms: float, techniques: Techniques) -> None:
    """Lines 15-27 of Algorithm 1: start the copies that have to start before ``task`` does.

    Tasks of which all inputs are on the device are passed over: nothing is to be done for them.

    Args:
        task: about to run, from ``now_ms`` to ``end_ms``.
        techniques: when copies start.
    """
    while (later := device.next_fetch()) is not None and is_due(device, task, end_ms, techniques):
        blocks = _missing(device, later)
        if not is_useful(device, task, later, blocks, spare_unused=techniques.spare_unused):
            return
        for block in blocks:
            room_ms = allocate(device, block, now_ms, needed_until=later)  # what tasks before `later` use stays
            if room_ms is None:
                return
            device.fetch(block, room_ms)


def is_due(device: Device, task: int, end_ms: float, techniques: Techniques) -> bool:
    """Eq. 9: would a later task be delayed if copies started only after ``task``, at ``end_ms``?

    EST(s), the expected start of a task, is the fastest time of all tasks before it plus every delay so far, the choice
    of a slower algorithm for ``task`` included: that is ``end_ms`` plus the fastest time of the tasks between. Beyond
    the paper, what the stream has still to copy by then counts, and so do the copies for the tasks between, see
    :class:`Techniques`.
    """
    queue_ms = max(0.0, device.lane.free_ms - end_ms)
    deadline_ms = device.fetch_deadline_ms(nearest_only=not techniques.prefetch_backlog)
    return queue_ms + device.sized.before_ms[task + 1] > deadline_ms


def is_useful(device: Device, task: int, later: int, blocks: list[int], *, spare_unused: bool) -> bool:
    """Return whether no defragmentation that would undo the prefetch is expected from ``task`` to ``later`` (line 16).

    The paper's prediction: of what is on the device, only blocks that may not leave count as occupying memory, that is
    those not used since they came (criterion 1); and all prefetches on the way are made, this one included. A
    defragmentation is expected where these and the task's own inputs, outputs and workspace exceed the memory.
    """
    sized = device.sized
    leaving: dict[int, int] = {}  # by task that uses them: bytes that may leave from then on
    pinned = 0

    def pin(block: int, use: int) -> int:
        leaving[use] = leaving.get(use, 0) + sized.sizes[block]
        return sized.sizes[block]

    for block, fetched in device.unused.items():
        # Inputs of the task that is about to run are used by it.
        if (fetched or spare_unused) and device.next_use[block] > task:
            pinned += pin(block, device.next_use[block])
    for block in blocks:
        pinned += pin(block, later)
    for between in range(task, later + 1):
        pinned -= leaving.pop(between, 0)
        if between > task and pinned + sized.least_bytes[between] > device.pool.capacity:
            return False
        for block in sized.makes[between] if spare_unused else ():
            pinned += pin(block, sized.next_use[between][block])
    return True


def _missing(device: Device, task: int) -> list[int]:
    return [block for block in device.sized.needs[task] if device.is_away(block)]
