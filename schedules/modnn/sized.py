"""A task graph for one sub-batch size, with numbers for names: what the simulators work on."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from retime.schedules.budget import STAYS, Algorithm, BlockKind, GraphTask, Phase, TaskGraph
from retime.schedules.errors import ScheduleError

NEVER = sys.maxsize
"""The next use of a block that no later task uses."""


class SizedAlgorithm(NamedTuple):
    """One way to run a task with a given sub-batch."""

    name: str
    ms: float
    workspace_bytes: int


@dataclass(frozen=True)
class Structure:
    """What does not depend on the sub-batch size.

    Blocks are numbered; those that stay in device memory and empty ones are left out.

    Args:
        is_input: whether a block comes from the host.
        needs: by task, blocks that must be in device memory and hold a value when it starts.
        rewrites: by task, those of ``needs`` that it writes again.
        makes: by task, blocks that it writes first.
        next_use: by task, for each of its blocks, the next task that uses it, or :data:`NEVER`.
        first_use: of each input, the first task that uses it.
    """

    tasks: tuple[GraphTask, ...]
    names: tuple[str, ...]
    is_input: tuple[bool, ...]
    needs: tuple[tuple[int, ...], ...]
    rewrites: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    next_use: tuple[Mapping[int, int], ...]
    first_use: Mapping[int, int]


@dataclass(frozen=True)
class SizedGraph(Structure):
    """What :func:`size_graph` makes.

    Args:
        before_ms: by task, the time of all earlier ones with the fastest algorithms; one more entry for the total.
    """

    samples: int
    sizes: tuple[int, ...]
    algorithms: tuple[tuple[SizedAlgorithm, ...], ...]
    before_ms: tuple[float, ...]
    resident_bytes: int

    @cached_property
    def data_bytes(self) -> tuple[int, ...]:
        """Bytes of inputs and outputs by task."""
        sizes = self.sizes
        return tuple(
            sum(sizes[block] for block in (*needs, *makes)) for needs, makes in zip(self.needs, self.makes, strict=True)
        )

    @cached_property
    def least_bytes(self) -> tuple[int, ...]:
        """Bytes of inputs, outputs and the smallest workspace by task (Eq. 6)."""
        return tuple(
            data + min(option.workspace_bytes for option in options)
            for data, options in zip(self.data_bytes, self.algorithms, strict=True)
        )


def size_graph(graph: TaskGraph, samples: int, *, update: bool = True) -> SizedGraph:
    """``graph`` for a sub-batch of so many samples.

    Args:
        samples: of one sub-batch, 1 or more.
        update: ``False`` leaves out the weight updates: all sub-batches but the last one end before them.

    Raises:
        ScheduleError: fewer than one sample, or a time that is negative.
    """
    if samples < 1:
        raise ScheduleError(f"a sub-batch of {samples} samples: give 1 or more")
    structure = _structure(graph, update)
    sized: dict[tuple[Algorithm, ...], tuple[SizedAlgorithm, ...]] = {}
    for task in structure.tasks:
        if task.algorithms not in sized:
            sized[task.algorithms] = _algorithms(task, samples)
    algorithms = tuple(sized[task.algorithms] for task in structure.tasks)
    fastest = (min(option.ms for option in options) for options in algorithms)
    return SizedGraph(
        **{entry.name: getattr(structure, entry.name) for entry in fields(structure)},
        samples=samples,
        sizes=tuple(graph.blocks[name].size_bytes(samples) for name in structure.names),
        algorithms=algorithms,
        before_ms=tuple(accumulate(fastest, initial=0.0)),
        resident_bytes=graph.resident_bytes(samples),
    )


# A planner sizes the same graph dozens of times; a graph is immutable, so its structure is kept as long as it lives.
_known: dict[tuple[int, bool], Structure] = {}


def _structure(graph: TaskGraph, update: bool) -> Structure:
    key = (id(graph), update)
    if key not in _known:
        _known[key] = _analyse(graph, update)
        weakref.finalize(graph, _known.pop, key, None)
    return _known[key]


def _analyse(graph: TaskGraph, update: bool) -> Structure:
    tasks = tuple(task for task in graph.tasks if update or task.phase is not Phase.UPDATE)
    # Sizes are rounded up, so a block that is empty with one sample always is.
    names = tuple(name for name, block in graph.blocks.items() if block.kind not in STAYS and block.size_bytes(1))
    number = {name: index for index, name in enumerate(names)}
    is_input = tuple(graph.blocks[name].kind is BlockKind.INPUT for name in names)

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
    return Structure(
        tasks=tasks,
        names=names,
        is_input=is_input,
        needs=tuple(needs),
        rewrites=tuple(rewrites),
        makes=tuple(makes),
        next_use=tuple(next_use),
        first_use={block: use for block, use in coming.items() if is_input[block]},
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
