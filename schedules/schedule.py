"""A schedule: which task comes after which, on one or several lanes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from retime.schedules.errors import ScheduleError, mark
from retime.schedules.tasks import Kind, Task

DEFAULT_LANE = "compute"
"""What an unnamed lane is called once it has neighbours."""


@dataclass(frozen=True)
class Lane:
    """Tasks that one resource (a stream, a link, a device) runs one after another.

    Args:
        name: the resource; empty when it is the schedule's only one and needs no name.
        tasks: in the order they run.
    """

    name: str
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if ":" in self.name or any(character.isspace() for character in self.name):
            raise ScheduleError(f"lane name {self.name!r}: leave out colons and white space, as in 'gpu0'")

    def __str__(self) -> str:
        words = " ".join(map(str, self.tasks))
        return f"{self.name}: {words}".rstrip() if self.name else words


@dataclass(frozen=True)
class Schedule:
    """The tasks of one or more training steps, in an order.

    A lane runs its tasks in the order given; lanes run side by side and wait for each other only where one task needs
    another (see :func:`retime.schedules.dependencies`). One unnamed lane prints as a plain sequence, several as one
    ``name: tasks`` line each, and ``Schedule.parse(str(schedule)) == schedule``.

    Args:
        lanes: with distinct names; a lane alone may go unnamed.

    Raises:
        ScheduleError: when two lanes share a name, or one of several has none.
    """

    lanes: tuple[Lane, ...]

    def __post_init__(self) -> None:
        for name, count in Counter(lane.name for lane in self.lanes).items():
            if not name and len(self.lanes) > 1:
                raise ScheduleError("one of several lanes has no name: name every lane, as in 'compute: F1 F2'")
            if count > 1:
                raise ScheduleError(f"lane {name!r} is given {count} times: join its tasks into one lane")
        if self.lanes == (Lane("", ()),):
            # Both print as the empty text, so only one of them can be a value.
            object.__setattr__(self, "lanes", ())

    @classmethod
    def sequence(cls, tasks: Iterable[Task]) -> Schedule:
        """One unnamed lane."""
        return cls((Lane("", tuple(tasks)),))

    @classmethod
    def from_lanes(cls, lanes: Mapping[str, Iterable[Task]]) -> Schedule:
        """Named lanes, in the mapping's order."""
        return cls(tuple(Lane(name, tuple(tasks)) for name, tasks in lanes.items()))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read a schedule from its text form.

        Line breaks inside an unnamed lane count as spaces, so a long schedule may be wrapped.

        >>> str(Schedule.parse("O3 W3 S3 O2 W1 S1 W2 S2"))
        'O3 W3 S3 O2 W1 S1 W2 S2'

        Raises:
            ScheduleError: when a word is no task; the message repeats the line and marks the word.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        named = [":" in line for line in lines]
        if any(named) and not all(named):
            stray = lines[named.index(False)].strip()
            raise ScheduleError(f"line {stray!r} has no lane: start it with a name, as in 'compute: {stray}'")
        if not any(named):
            return cls.sequence(_read(" ".join(lines).split(), prefix=""))
        lanes = []
        for line in lines:
            name, words = line.split(":", 1)
            if not name.strip():
                raise ScheduleError(f"line {line.strip()!r} has an empty lane name: put one before the colon")
            lanes.append(Lane(name.strip(), tuple(_read(words.split(), prefix=f"{name.strip()}: "))))
        return cls(tuple(lanes))

    def split(self, resources: Mapping[str, str]) -> Schedule:
        """Deal the tasks of a one-lane schedule out to lanes by kind, keeping their order within each lane.

        Args:
            resources: the lane for a kind, such as ``{"S": "network"}``; the other kinds stay in the schedule's own
                lane, called ``"compute"`` when it has no name.

        Raises:
            ScheduleError: when the schedule already has several lanes, or a key of ``resources`` is no kind.
        """
        for key in resources:
            if key not in {kind.value for kind in Kind}:
                raise ScheduleError(f"resources has the key {key!r}: use the letters F O W S U D P")
        if len(self.lanes) > 1:
            names = ", ".join(lane.name for lane in self.lanes)
            raise ScheduleError(f"the schedule already has the lanes {names}: leave out resources")
        own = self.lanes[0].name if self.lanes else ""
        dealt: dict[str, list[Task]] = {own or DEFAULT_LANE: []}
        for task in self:
            dealt.setdefault(resources.get(task.kind, own or DEFAULT_LANE), []).append(task)
        return Schedule.from_lanes(dealt)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, lane after lane."""
        return tuple(self)

    def __iter__(self) -> Iterator[Task]:
        for lane in self.lanes:
            yield from lane.tasks

    def __len__(self) -> int:
        return sum(len(lane.tasks) for lane in self.lanes)

    def __contains__(self, task: object) -> bool:
        return any(task in lane.tasks for lane in self.lanes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lanes))


def _read(words: list[str], *, prefix: str) -> list[Task]:
    tasks = []
    for position, word in enumerate(words):
        try:
            tasks.append(Task.parse(word))
        except ScheduleError as error:
            raise ScheduleError(f"{error}\n{mark(words, position, prefix=prefix)}") from None
    return tasks
