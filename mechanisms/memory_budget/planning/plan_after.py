"""A plan from one step that was trained with everything offloaded, where nothing may be tried out."""

from __future__ import annotations

from collections.abc import Sequence

from retime.mechanisms.memory_budget.planning.choice import PlanChoice
from retime.schedules.budget import BudgetError, OffloadPlan

__all__ = ["plan_after"]

_USED = 0.8
"""So much of the budget is given away: other batches of the shape, and the update, may need more than was measured."""


def plan_after(samples: int, sizes: Sequence[int], needed_bytes: int | None, budget_bytes: int) -> PlanChoice:
    """What stays on the device from the second step on.

    What was saved last is needed first and lies idle the shortest, so that stays, as long as there is room.

    Args:
        samples: of the batch.
        sizes: bytes of each storage that the step saved, by number.
        needed_bytes: the most that the step held, everything offloaded; None where it cannot be measured: then all of
            it goes away again.
        budget_bytes: for all of it.

    Raises:
        BudgetError: the step needed more than the budget.
    """
    if needed_bytes is not None and needed_bytes > budget_bytes:
        raise BudgetError(
            f"a budget of {budget_bytes} bytes was exceeded in the first step of a shape",
            floor_bytes=needed_bytes,
            task="",
            layer="",
            hint="Everything it saves was offloaded already, and dry_run='off' neither looks ahead nor splits batches: "
            "use dry_run='auto', or a smaller batch",
            samples=samples,
        )
    largest = max(sizes, default=0)
    room = int(_USED * budget_bytes) - needed_bytes if needed_bytes is not None else 0
    ahead = room >= 2 * largest  # one storage on its way out, and one that is fetched ahead
    room -= 2 * largest if ahead else 0
    away = []
    for number in reversed(range(len(sizes))):
        if sizes[number] <= room:
            room -= sizes[number]
        else:
            away.append(number)
    moved = sum(sizes[number] for number in away)
    held = budget_bytes if needed_bytes is None else needed_bytes + sum(sizes) - moved
    held += 2 * largest if ahead and away else 0
    plan = OffloadPlan(samples, frozenset(away), int(ahead), len(sizes))
    return PlanChoice(plan, largest if ahead and away else 0, held, 0.0, 0.0, moved, moved, tensor_bytes=held)
