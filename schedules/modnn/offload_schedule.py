"""Data transfer scheduling and algorithm selection inside a budget: Algorithm 1 of moDNN (section 5.2)."""

from __future__ import annotations

from retime.schedules.budget import TaskGraph
from retime.schedules.errors import ScheduleError
from retime.schedules.modnn.algorithm_choice import Choice, choose_algorithm
from retime.schedules.modnn.bounds import require_floor
from retime.schedules.modnn.device import WORKSPACE, Device
from retime.schedules.modnn.offload_scheme import find_scheme
from retime.schedules.modnn.prefetch import prefetch
from retime.schedules.modnn.result import OffloadSchedule
from retime.schedules.modnn.run_log import RunLog
from retime.schedules.modnn.sized import size_graph
from retime.schedules.modnn.techniques import Techniques


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
        self,
        graph: TaskGraph,
        samples: int,
        budget_bytes: int,
        bandwidth: float,
        techniques: Techniques,
        update: bool,
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
            claimed_ms = self._claim(block, task)
            if claimed_ms is None:
                self._defragment(task)
                return
            device.next_use[block] = task
            room_ms[block] = claimed_ms
        for block in missing:
            device.fetch(block, max(self.now_ms, room_ms[block]))
        arrivals_ms = [device.ready_ms[block] for block in sized.needs[task]]
        self.now_ms = max([self.now_ms, *arrivals_ms, *room_ms.values()])

    def _claim(self, block: int, task: int) -> float | None:
        """Memory for a block that ``task`` uses; returns from when on, or ``None`` when there is no scheme."""
        room_ms = self.device.allocate(block, self.now_ms)
        if room_ms is None and self._make_room(self.sized.sizes[block], task):
            room_ms = self.device.allocate(block, self.now_ms)
        return room_ms

    def _make_room(self, size: int, task: int) -> bool:
        scheme = find_scheme(self.device, size, self.now_ms, needed_until=task)
        if scheme is None and not self.techniques.spare_unused:
            scheme = find_scheme(self.device, size, self.now_ms, needed_until=task, unused_too=True)
        for block in scheme.blocks if scheme else ():
            self.device.offload(block, self.now_ms)
        return scheme is not None

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
        device, sized = self.device, self.sized
        start_ms, end_ms = self.now_ms, self.now_ms + choice.algorithm.ms
        name = sized.tasks[task].name
        for block in sized.makes[task]:
            device.made(block, start_ms, end_ms)
        for block in sized.needs[task]:
            device.unused.pop(block, None)
        for block in sized.rewrites[task]:
            device.rewritten(block, end_ms)
        if choice.segment:
            device.hold_workspace(choice.segment, f"workspace of {name}", start_ms, end_ms)
        device.finish(task, end_ms)
        self.log.ran(task, start_ms, end_ms, choice.algorithm)
        self.now_ms = end_ms
