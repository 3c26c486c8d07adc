"""A task graph for one sub-batch size, with numbers for names: what the simulators work on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from retime.schedules.errors import ScheduleError
from retime.schedules.memory.graph import STAYS, BlockKind, GraphTask, Phase, TaskGraph

NEVER = sys.maxsize
"""The next use of a block that no later task uses."""


@dataclass(frozen=True)
class SizedAlgorithm:
    """One way to run a task with a given sub-batch."""

    name: str
    ms: float
    workspace_bytes: int


@dataclass(frozen=True)
class SizedGraph:
    """What :func:`size_graph` makes. Blocks are numbered, and those that stay in device memory or are empty left out.

    Args:
        samples: the sub-batch size.
        tasks: as in the graph.
        names: of the blocks.
        sizes: bytes of each block.
        is_input: whether a block comes from the host.
        needs: by task, blocks that must be in device memory and hold a value when it starts.
        rewrites: by task, those of ``needs`` that it writes again.
        makes: by task, blocks that it writes first.
        next_use: by task, for each of its blocks, the next task that uses it.
        first_use: of each input, the first task that uses it.
        algorithms: by task.
        before_ms: by task, the time of all earlier ones with the fastest algorithms; one more entry for the total.
        resident_bytes: what stays in device memory throughout.
    """

    samples: int
    tasks: tuple[GraphTask, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    is_input: tuple[bool, ...]
    needs: tuple[tuple[int, ...], ...]
    rewrites: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    next_use: tuple[Mapping[int, int], ...]
    first_use: Mapping[int, int]
    algorithms: tuple[tuple[SizedAlgorithm, ...], ...]
    before_ms: tuple[float, ...]
    resident_bytes: int

    def data_bytes(self, task: int) -> int:
        """Inputs and outputs of a task."""
        return sum(self.sizes[block] for block in (*self.needs[task], *self.makes[task]))

    def least_bytes(self, task: int) -> int:
        """Inputs, outputs and the smallest workspace of a task (Eq. 6)."""
        return self.data_bytes(task) + min(option.workspace_bytes for option in self.algorithms[task])


def size_graph(graph: TaskGraph, samples: int, *, update: bool = True) -> SizedGraph:
    """``graph`` for a sub-batch of so many samples.

    Args:
        graph: the step's tasks and blocks.
        samples: of one sub-batch, 1 or more.
        update: ``False`` leaves out the weight updates: all sub-batches but the last one end before them.

    Raises:
        ScheduleError: fewer than one sample, or a time that is negative.
    """
    if samples < 1:
        raise ScheduleError(f"a sub-batch of {samples} samples: give 1 or more")
    tasks = tuple(task for task in graph.tasks if update or task.phase is not Phase.UPDATE)
    moving = {
        name: size
        for name, block in graph.blocks.items()
        if block.kind not in STAYS and (size := block.size_bytes(samples))
    }
    number = {name: index for index, name in enumerate(moving)}
    is_input = tuple(graph.blocks[name].kind is BlockKind.INPUT for name in moving)

    alive = {index for index, given in enumerate(is_input) if given}
    needs, rewrites, makes = [], [], []
    for task in tasks:
        reads = [number[name] for name in task.reads if name in number]
        writes = [number[name] for name in task.writes if name in number]
        # A block written again keeps what it held (a gradient that several tasks add to), so it has to be there.
        again = [block for block in writes if block in alive]
        needs.append(tuple(dict.fromkeys([*reads, *again])))
        rewrites.append(tuple(dict.fromkeys(again)))
        makes.append(tuple(dict.fromkeys(block for block in writes if block not in alive)))
        alive.update(writes)

    coming: dict[int, int] = {}
    next_use: list[Mapping[int, int]] = []
    for index in range(len(tasks) - 1, -1, -1):
        blocks = (*needs[index], *makes[index])
        next_use.append({block: coming.get(block, NEVER) for block in blocks})
        coming.update(dict.fromkeys(blocks, index))
    next_use.reverse()

    algorithms = tuple(_algorithms(task, samples) for task in tasks)
    fastest = [min(option.ms for option in options) for options in algorithms]
    return SizedGraph(
        samples=samples,
        tasks=tasks,
        names=tuple(moving),
        sizes=tuple(moving.values()),
        is_input=is_input,
        needs=tuple(needs),
        rewrites=tuple(rewrites),
        makes=tuple(makes),
        next_use=tuple(next_use),
        first_use={block: use for block, use in coming.items() if is_input[block]},
        algorithms=algorithms,
        before_ms=tuple(accumulate(fastest, initial=0.0)),
        resident_bytes=graph.resident_bytes(samples),
    )


def _algorithms(task: GraphTask, samples: int) -> tuple[SizedAlgorithm, ...]:
    options = tuple(
        SizedAlgorithm(option.name, option.ms(samples), option.workspace_bytes(samples)) for option in task.algorithms
    )
    if not options:
        raise ScheduleError(f"task {task.name!r} has no algorithm: give at least one")
    slow = next((option for option in options if not option.ms >= 0), None)
    if slow:
        raise ScheduleError(f"task {task.name!r} takes {slow.ms} ms by {slow.name!r}: give 0 or more milliseconds")
    return options
