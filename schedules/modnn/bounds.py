"""What a step takes at a sub-batch size: at least, when nothing leaves the device, and which size the paper chooses.

A task graph for one sub-batch size has numbers for names (:class:`SizedGraph`): that is what the simulators work on.
Bounds are those of moDNN, section 5.1.1 and Figure 9, the choice of a size that of section 5.1.2.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from retime.schedules.budget import STAYS, Algorithm, BlockKind, BudgetError, GraphTask, Phase, TaskGraph
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
    """Part of a task graph that does not depend on the sub-batch size.

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
    """Result of :func:`size_graph`.

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


@dataclass(frozen=True)
class Floor:
    """The least memory for one sub-batch size: Eq. 7 of the paper, with the smallest workspace of each task.

    Args:
        resident_bytes: S_W: parameters, gradients and optimizer states, which stay in device memory.
        working_bytes: inputs, outputs and workspace of the largest task (Eq. 6).
        workspace_bytes: the workspace within ``working_bytes``.
    """

    samples: int
    resident_bytes: int
    working_bytes: int
    task: str
    layer: str
    workspace_bytes: int

    @property
    def bytes(self) -> int:
        """The smallest budget."""
        return self.resident_bytes + self.working_bytes


def lower_bound(graph: TaskGraph, samples: int = 1) -> Floor:
    """The floor for sub-batches of ``samples`` (Eq. 7 with 1 sample).

    It holds for this graph of blocks; a run-time that keeps more alive than its blocks has a higher floor.
    """
    sized = size_graph(graph, samples)
    worst = max(range(len(sized.tasks)), key=sized.least_bytes.__getitem__, default=None)
    if worst is None:
        return Floor(samples, sized.resident_bytes, 0, "", "", 0)
    task, working = sized.tasks[worst], sized.least_bytes[worst]
    workspace = working - sized.data_bytes[worst]
    return Floor(samples, sized.resident_bytes, working, task.name, task.layer, workspace)


def lower_bound_offloading_weights(graph: TaskGraph, samples: int = 1) -> int:
    """The floor if weights, too, were in device memory only while a task uses them (Figure 9, second series), in bytes.

    Weight updates are left out, as in the paper's graph: they can go weight by weight.
    """
    return max(
        (
            sum(graph.blocks[name].size_bytes(samples) for name in dict.fromkeys((*task.reads, *task.writes)))
            + min(option.workspace_bytes(samples) for option in task.algorithms)
            for task in graph.tasks
            if task.phase is not Phase.UPDATE
        ),
        default=0,
    )


def ideal_peak_bytes(graph: TaskGraph, samples: int, *, workspace: str = "fastest") -> int:
    """The peak when nothing leaves the device: each block lives from its first task to its last, inputs from the start.

    Args:
        samples: the whole batch.
        workspace: ``"fastest"``, as in the paper's ideal case; ``"least"`` for the smallest workspace of each task.
    """
    sized = size_graph(graph, samples)
    return sized.resident_bytes + max(alive_bytes(sized, workspace), default=0)


def alive_bytes(sized: SizedGraph, workspace: str = "fastest") -> list[int]:
    """Live bytes by task, when nothing leaves the device, beside what stays there throughout."""
    freed = [sum(sized.sizes[block] for block, later in uses.items() if later == NEVER) for uses in sized.next_use]
    alive = sum(sized.sizes[block] for block in sized.first_use)
    curve = []
    for task, blocks in enumerate(sized.makes):
        alive += sum(sized.sizes[block] for block in blocks)
        curve.append(alive + _workspace_bytes(sized, task, workspace))
        alive -= freed[task]
    return curve


def all_blocks_bytes(graph: TaskGraph, samples: int) -> int:
    """Every block at the same time and the largest workspace: the ideal case of a framework that reuses no memory."""
    sized = size_graph(graph, samples)
    workspace = max((_workspace_bytes(sized, task, "fastest") for task in range(len(sized.tasks))), default=0)
    return sized.resident_bytes + sum(sized.sizes) + workspace


def require_floor(graph: TaskGraph, samples: int, budget_bytes: int, *, splitting: bool = True) -> Floor:
    """The floor for ``samples``.

    Args:
        samples: the smallest sub-batch allowed.
        splitting: whether ``samples`` was free to choose: says which way out the error names.

    Raises:
        BudgetError: the budget is below it; the error names the floor, the largest task, its layer and what would help.
    """
    floor = lower_bound(graph, samples)
    if floor.bytes <= budget_bytes:
        return floor
    raise BudgetError(
        f"a budget of {budget_bytes} bytes cannot hold one step with {samples} sample{'s' if samples > 1 else ''} at a "
        "time",
        floor_bytes=floor.bytes,
        task=floor.task,
        layer=floor.layer,
        hint=_hint(graph, floor, budget_bytes, splitting),
    )


def _hint(graph: TaskGraph, floor: Floor, budget_bytes: int, splitting: bool) -> str:
    by_kind = {
        kind.value: sum(block.size_bytes(floor.samples) for block in graph.blocks.values() if block.kind is kind)
        for kind in sorted(STAYS)
    }
    staying = ", ".join(f"{kind} {size}" for kind, size in by_kind.items() if size)
    if floor.resident_bytes >= budget_bytes:
        return (
            f"What stays on the device takes {floor.resident_bytes} bytes alone ({staying}): use fewer or smaller "
            "parameters, an optimizer with less state, or shard them over devices"
        )
    smallest = lower_bound(graph, 1).bytes
    if not splitting and floor.samples > 1 and smallest < floor.bytes:
        return f"Sub-batches would help: with 1 sample at a time {smallest} bytes are enough"
    if 2 * floor.workspace_bytes > floor.working_bytes:
        return (
            f"{floor.workspace_bytes} bytes are workspace of layer {floor.layer!r}: "
            "use an algorithm or a kernel that needs less"
        )
    return (
        f"{floor.working_bytes} bytes are inputs, outputs and workspace of layer {floor.layer!r}, beside "
        f"{floor.resident_bytes} that stay on the device: make that layer or its input smaller, or use a smaller "
        "data type"
    )


def _workspace_bytes(sized: SizedGraph, task: int, workspace: str) -> int:
    options = sized.algorithms[task]
    if workspace == "least":
        return min(option.workspace_bytes for option in options)
    return min(options, key=lambda option: (option.ms, option.workspace_bytes)).workspace_bytes


ALPHA = 0.15
"""The share of consecutive tasks whose data the budget has to hold: the paper's empirical value."""


def consecutive_bytes(graph: TaskGraph, samples: int, alpha: float = ALPHA) -> int:
    """Eq. 8: the most bytes that any ``alpha`` of the tasks, consecutive ones, touch together.

    Data that several of them use count once; workspace is reused, so the largest one of the fastest algorithms counts;
    what stays on the device is added. Weight updates are not among the tasks, as in the paper's graph.

    Raises:
        ScheduleError: ``alpha`` is not within 0 and 1.
    """
    if not 0 < alpha <= 1:
        raise ScheduleError(
            f"alpha={alpha} is a share of the tasks: give a number above 0 and up to 1, such as {ALPHA}"
        )
    sized = size_graph(graph, samples)
    kept = [index for index, task in enumerate(sized.tasks) if task.phase is not Phase.UPDATE]
    return sized.resident_bytes + _widest_window(sized, kept, max(1, int(alpha * len(kept))))


def largest_feasible(graph: TaskGraph, batch: int, budget_bytes: int) -> int:
    """The largest sub-batch with which each single task fits (Eq. 6), by binary search over 1 to ``batch``.

    Raises:
        BudgetError: not even one sample fits.
    """
    require_floor(graph, 1, budget_bytes)

    def fits(samples: int) -> bool:
        sized = size_graph(graph, samples)
        return sized.resident_bytes + max(sized.least_bytes, default=0) <= budget_bytes

    return _largest(batch, fits)


def select_sub_batch(graph: TaskGraph, batch: int, budget_bytes: int) -> int:
    """The paper's sub-batch size: the largest for which Eq. 8 is within the budget, made regular.

    Where even one sample exceeds Eq. 8, which asks for more than the floor does, the answer is 1.

    Args:
        batch: samples of the whole batch; the answer is at most this.
        budget_bytes: what everything has to fit into.

    Raises:
        BudgetError: not even one sample fits.
        ScheduleError: a batch without samples.
    """
    if batch < 1:
        raise ScheduleError(f"a batch of {batch} samples: give 1 or more")
    require_floor(graph, 1, budget_bytes)
    largest = _largest(batch, lambda samples: consecutive_bytes(graph, samples) <= budget_bytes)
    return regular(largest) if largest < batch else batch


def regular(samples: int) -> int:
    """``samples`` rounded down as the paper does: to a multiple of 64 from 64 on, of 32 from 32 on, and so on.

    >>> [regular(samples) for samples in (200, 100, 63, 31, 5, 1)]
    [192, 64, 32, 16, 4, 1]
    """
    if samples < 1:
        raise ScheduleError(f"a sub-batch of {samples} samples: give 1 or more")
    power = min(64, 1 << samples.bit_length() - 1)
    return samples // power * power


def _largest(batch: int, fits: Callable[[int], bool]) -> int:
    low, high = 1, batch
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _widest_window(sized: SizedGraph, tasks: list[int], width: int) -> int:
    """The largest sum of data and workspace over ``width`` consecutive tasks."""
    uses: dict[int, int] = {}
    spaces: deque[tuple[int, int]] = deque()  # (place, workspace), falling: the first is the window's largest
    data = widest = 0
    for place, task in enumerate(tasks):
        for block in (*sized.needs[task], *sized.makes[task]):
            data += sized.sizes[block] if not uses.get(block) else 0
            uses[block] = uses.get(block, 0) + 1
        option = min(sized.algorithms[task], key=lambda option: (option.ms, option.workspace_bytes))
        while spaces and spaces[-1][1] <= option.workspace_bytes:
            spaces.pop()
        spaces.append((place, option.workspace_bytes))
        if place >= width:
            gone = tasks[place - width]
            for block in (*sized.needs[gone], *sized.makes[gone]):
                uses[block] -= 1
                data -= sized.sizes[block] if not uses[block] else 0
        if spaces[0][0] <= place - width:
            spaces.popleft()
        widest = max(widest, data + spaces[0][1])
    return widest
