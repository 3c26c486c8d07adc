"""Does a schedule respect the dependencies?  If not: which one breaks first, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from retime.schedules.dependencies import dependencies
from retime.schedules.errors import ScheduleError, mark
from retime.schedules.schedule import Lane, Schedule
from retime.schedules.tasks import Task

Needs = Mapping[Task, Iterable[Task]]
"""What each task needs to have finished; a task that is not a key needs nothing."""


def validate(schedule: Schedule, needs: Needs | None = None) -> None:
    """Check that every task can run: no need is missing, none comes later, no lanes wait for each other in a circle.

    >>> validate(Schedule.parse("W2 O3 W3"))
    Traceback (most recent call last):
    retime.schedules.errors.ScheduleError: W2 needs O3, which comes later
      W2 O3 W3
      ^^ <-- ERROR HERE

    Args:
        schedule: one or several steps on one or several lanes.
        needs: what each task needs, for a model that is no chain of layers; :func:`dependencies` when left out.

    Raises:
        ScheduleError: at the first broken dependency, with its lane and a mark.
    """
    execution_order(schedule, needs)


def execution_order(schedule: Schedule, needs: Needs | None = None) -> dict[Task, tuple[Task, ...]]:
    """Run the schedule without times: every lane in its own order, every task as soon as its needs are met.

    Returns:
        The tasks in an order in which all of them can run, each with its needs.

    Raises:
        ScheduleError: see :func:`validate`.
    """
    return _Run(schedule, dependencies(schedule) if needs is None else needs).order


class _Run:
    def __init__(self, schedule: Schedule, needs: Needs) -> None:
        self._lanes = schedule.lanes
        self._lane_of: dict[Task, int] = {}
        for index, lane in enumerate(self._lanes):
            for position, task in enumerate(lane.tasks):
                if task in self._lane_of:
                    raise ScheduleError(f"{task} is there twice: leave one out\n{_mark(lane, position)}")
                self._lane_of[task] = index
        self._needs = {task: tuple(needs.get(task, ())) for task in schedule}
        self._next = [0] * len(self._lanes)
        self.order: dict[Task, tuple[Task, ...]] = {}
        self._run()
        if len(self.order) < len(schedule):
            self._explain()

    def _run(self) -> None:
        waiting: dict[Task, list[int]] = defaultdict(list)
        ready = list(range(len(self._lanes)))[::-1]
        while ready:
            index = ready.pop()
            while (head := self._head(index)) is not None:
                open_need = self._open_need(head)
                if open_need is not None:
                    waiting[open_need].append(index)
                    break
                self.order[head] = self._needs[head]
                self._next[index] += 1
                ready += waiting.pop(head, [])

    def _head(self, index: int) -> Task | None:
        tasks, position = self._lanes[index].tasks, self._next[index]
        return tasks[position] if position < len(tasks) else None

    def _open_need(self, task: Task) -> Task | None:
        return next((need for need in self._needs[task] if need not in self.order), None)

    def _explain(self) -> None:
        """Follow who waits for whom from the first stuck lane, to a plain mistake or around a circle."""
        index = next(index for index in range(len(self._lanes)) if self._head(index) is not None)
        visited: list[int] = []
        waits: list[str] = []
        while index not in visited:
            visited.append(index)
            head = self._head(index)
            assert head is not None
            need = self._open_need(head)
            assert need is not None
            here = _mark(self._lanes[index], self._next[index])
            if need not in self._lane_of:
                raise ScheduleError(f"{head} needs {need}, which is missing\n{here}")
            if self._lane_of[need] == index:
                later = "itself" if need == head else f"{need}, which comes later"
                raise ScheduleError(f"{head} needs {later}\n{here}")
            index = self._lane_of[need]
            blocker = self._head(index)
            behind = "" if blocker == need else f", which lane {self._lanes[index].name} runs after {blocker}"
            waits.append(f"{head} needs {need}{behind}")
        start = visited.index(index)
        where = _mark(self._lanes[index], self._next[index])
        raise ScheduleError(f"lanes wait for each other in a circle: {'; '.join(waits[start:])}\n{where}")


def _mark(lane: Lane, position: int) -> str:
    return mark([str(task) for task in lane.tasks], position, prefix=f"{lane.name}: " if lane.name else "")
