"""What a step needs at least, and what it takes when nothing leaves the device (moDNN, section 5.1.1 and Figure 9)."""

from __future__ import annotations

from dataclasses import dataclass

from retime.schedules.budget import STAYS, BudgetError, Phase, TaskGraph
from retime.schedules.modnn.sized import SizedGraph, size_graph


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
    freed = [0] * len(sized.tasks)
    for block, task in _last_use(sized).items():
        freed[task] += sized.sizes[block]
    alive = sum(sized.sizes[block] for block in sized.first_use)
    curve = []
    for task, made in enumerate(sized.makes):
        alive += sum(sized.sizes[block] for block in made)
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
        f"a budget of {budget_bytes} bytes cannot hold one step with {_samples(samples)} at a time",
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


def _last_use(sized: SizedGraph) -> dict[int, int]:
    last: dict[int, int] = {}
    for task, blocks in enumerate(sized.next_use):
        last.update(dict.fromkeys(blocks, task))
    return last


def _samples(count: int) -> str:
    return f"{count} sample{'s' if count > 1 else ''}"
