"""Schedules as data: the tasks of a training step, their order on lanes, what each needs, and the check of it all.

Text form of a task: a letter, a number, and two optional marks::

    F2       forward of layer 2
    F2@1     ... of micro-batch 1 (micro-batches count from 0)
    F2'      ... of the next training step (one apostrophe a step)
    F2@1'    both

Layers count from 1. For D and P the number is that of a tensor: tensor t is the output of layer t, tensor 0 the batch.

A schedule may leave a whole kind out of a step: a plan for the backward pass lists no F and takes the forward pass as
done. What a listed task needs from a kind that *is* listed must be there, so that forgetting one O is an error. Layers
without parameters have no W, S and U.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from retime.schedules.errors import ScheduleError, mark

_FORM = re.compile(r"([A-Z])(\d+)(?:@(\d+))?('*)", re.ASCII)
_FORM_IN_WORDS = (
    "a task is one of the letters F O W S U D P and a number, then optionally @micro-batch and one ' for each step "
    "after the first, such as F2, W3@0 or F1'"
)


class Kind(StrEnum):
    """Kind of task; the letter is its text form."""

    F = "F"
    """Forward of a layer."""
    O = "O"  # noqa: E741 - the papers' letter
    """Output gradient: the loss's gradient with respect to the layer's input."""
    W = "W"
    """Weight gradient of a layer."""
    S = "S"
    """Synchronisation of a layer's weight gradient between workers."""
    U = "U"
    """Update of a layer's parameters."""
    D = "D"
    """Offload of a tensor, device to host."""
    P = "P"
    """Prefetch of a tensor, host to device."""

    @property
    def words(self) -> str:
        """The kind in words, for legends."""
        return _WORDS[self]


_WORDS = {
    Kind.F: "forward",
    Kind.O: "output gradient",
    Kind.W: "weight gradient",
    Kind.S: "synchronisation",
    Kind.U: "update",
    Kind.D: "offload",
    Kind.P: "prefetch",
}


@dataclass(frozen=True, order=True)
class Task:
    """One task of a training step; ``str()`` gives the text form and :meth:`parse` reads it back.

    Args:
        kind: what is done.
        layer: which layer, from 1; for D and P which tensor, from 0 (tensor t is the output of layer t).
        micro_batch: which micro-batch, from 0; ``None`` for the whole batch.
        step: which training step, from 0: ``F1'`` is step 1.

    Raises:
        ScheduleError: when a number is out of range.
    """

    kind: Kind
    layer: int
    micro_batch: int | None = None
    step: int = 0

    def __post_init__(self) -> None:
        lowest = 0 if self.kind in (Kind.D, Kind.P) else 1
        if self.layer < lowest:
            what = "tensors count from 0" if lowest == 0 else "layers count from 1"
            raise ScheduleError(f"there is no task {self.kind}{self.layer}: {what}")
        if self.micro_batch is not None and self.micro_batch < 0:
            raise ScheduleError(f"micro_batch={self.micro_batch}: micro-batches count from 0; None is the whole batch")
        if self.step < 0:
            raise ScheduleError(f"step={self.step}: steps count from 0")

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else f"@{self.micro_batch}"
        return f"{self.kind}{self.layer}{micro_batch}{chr(39) * self.step}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read one task from its text form.

        Raises:
            ScheduleError: when ``text`` is not a task; the message repeats it and gives the form.
        """
        match = _FORM.fullmatch(text)
        if match is None or match[1] not in _LETTERS:
            raise ScheduleError(f"cannot read task {text!r}: {_FORM_IN_WORDS}")
        micro_batch = None if match[3] is None else int(match[3])
        return cls(Kind(match[1]), int(match[2]), micro_batch, len(match[4]))


_LETTERS = frozenset(kind.value for kind in Kind)


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

    def marked(self, position: int) -> str:
        """The lane as one line and, under it, carets below the task at ``position``."""
        return mark([str(task) for task in self.tasks], position, prefix=f"{self.name}: " if self.name else "")


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


def dependencies(tasks: Iterable[Task]) -> dict[Task, tuple[Task, ...]]:
    """Return what each task needs to have finished before it starts.

    With n the highest layer listed, and per step and micro-batch:

    - ``F_i`` needs ``F_{i-1}``, and the previous step's last word on the layer: ``U_i``, else ``S_i``, else ``W_i``
      (Oh et al. 2022, section 2, constraints on ``T(F_i)``).
    - ``O_i`` and ``W_i`` need ``O_{i+1}``, those of layer n need ``F_n`` (same place, constraints on ``T(δO_i)`` and
      ``T(δW_i)``).
    - ``S_i`` needs ``W_i``; a task without micro-batch needs all micro-batches.
    - ``U_i`` needs ``W_i``, ``S_i`` and the layer's uses of the old parameters, ``F_i`` and ``O_i``: updating before
      ``O_i`` would differentiate with the new values (Jiang et al. 2020, appendix B.2).
    - ``D_t`` needs ``F_t``, ``P_t`` needs ``D_t``. ``O_{t+1}`` and ``W_{t+1}`` read tensor t, the output of layer t, so
      they need ``P_t`` (Chen et al. 2019, section 3.2); for the last layer's output that is ``O_n`` and ``W_n``.

    Args:
        tasks: one or several steps, in any order.

    Returns:
        One entry a task. A need that is not among ``tasks`` is one that the validator reports as missing.
    """
    tasks = list(tasks)
    rules = _Rules(tasks)
    return {task: tuple(dict.fromkeys(rules.needs(task))) for task in tasks}


class _Rules:
    def __init__(self, tasks: list[Task]) -> None:
        self._at: dict[tuple[Kind, int, int], list[Task]] = defaultdict(list)
        self._kinds: set[tuple[Kind, int]] = set()
        layers = [task.layer for task in tasks if task.kind in (Kind.F, Kind.O, Kind.W)]
        self._first_layer, self._last_layer = min(layers, default=1), max(layers, default=1)
        for task in tasks:
            self._at[task.kind, task.layer, task.step].append(task)
            self._kinds.add((task.kind, task.step))

    def needs(self, task: Task) -> list[Task]:
        match task.kind:
            case Kind.F:
                return self._forward(task)
            case Kind.O | Kind.W:
                return self._backward(task)
            case Kind.S:
                return self._required(task, Kind.W, task.layer)
            case Kind.U:
                return [
                    *self._required(task, Kind.W, task.layer),
                    *self._required(task, Kind.S, task.layer),
                    *self._listed(task, Kind.O, task.layer),
                    *self._listed(task, Kind.F, task.layer),
                ]
            case Kind.D:
                return self._required(task, Kind.F, task.layer) if task.layer >= self._first_layer else []
            case Kind.P:
                return self._listed(task, Kind.D, task.layer)

    def _forward(self, task: Task) -> list[Task]:
        needs = self._required(task, Kind.F, task.layer - 1) if task.layer > self._first_layer else []
        for kind in (Kind.U, Kind.S, Kind.W):
            # The parameters are one for all micro-batches, so this need crosses them.
            last_word = self._at.get((kind, task.layer, task.step - 1), [])
            if last_word:
                return needs + last_word
        return needs

    def _backward(self, task: Task) -> list[Task]:
        is_last = task.layer == self._last_layer
        needs = [] if is_last else self._required(task, Kind.O, task.layer + 1)
        if not needs:  # the top layer, or a plan without O: the gradient comes straight from the loss
            needs = self._required(task, Kind.F, self._last_layer)
        for tensor in (task.layer - 1, task.layer) if is_last else (task.layer - 1,):
            prefetches = self._listed(task, Kind.P, tensor)
            if not prefetches and self._listed(task, Kind.D, tensor):
                prefetches = [Task(Kind.P, tensor, task.micro_batch, task.step)]  # offloaded and never brought back
            needs += prefetches
        return needs

    def _listed(self, task: Task, kind: Kind, layer: int) -> list[Task]:
        """The listed tasks of ``kind`` that share the step and, where both have one, the micro-batch."""
        return [
            other
            for other in self._at.get((kind, layer, task.step), [])
            if task.micro_batch is None or other.micro_batch in (None, task.micro_batch)
        ]

    def _required(self, task: Task, kind: Kind, layer: int) -> list[Task]:
        """Return what :meth:`_listed` does, but a step that lists the kind at all must list this one."""
        listed = self._listed(task, kind, layer)
        if listed or (kind, task.step) not in self._kinds:
            return listed
        return [Task(kind, layer, task.micro_batch, task.step)]


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
                    raise ScheduleError(f"{task} is there twice: leave one out\n{lane.marked(position)}")
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
            here = self._lanes[index].marked(self._next[index])
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
        where = self._lanes[index].marked(self._next[index])
        raise ScheduleError(f"lanes wait for each other in a circle: {'; '.join(waits[start:])}\n{where}")
