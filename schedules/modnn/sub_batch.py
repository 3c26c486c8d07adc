"""How many samples go through the model at once: the paper's choice (moDNN, section 5.1.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from retime.schedules.budget import Phase, TaskGraph
from retime.schedules.errors import ScheduleError
from retime.schedules.modnn.bounds import require_floor
from retime.schedules.modnn.sized import SizedGraph, size_graph

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
