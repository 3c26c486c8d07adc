"""The fastest plan within a budget: sub-batch size, what is offloaded, and how far ahead it is fetched.

The paper chooses the sub-batch first (Eq. 8) and then what moves (Algorithm 1). Here both are chosen together, by
predicted time, and what is chosen has been run dry.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

from retime.foundations.arguments import AtLeast, checked
from retime.mechanisms.memory_budget.dry_run import TrainingStep
from retime.mechanisms.memory_budget.planning.candidates import (
    candidate_plans,
    part_sizes,
    predicted_choice,
    with_exact_peak,
)
from retime.mechanisms.memory_budget.planning.choice import PlanChoice
from retime.mechanisms.memory_budget.planning.costs import StepCosts
from retime.mechanisms.memory_budget.planning.step_memory import StepMemory
from retime.mechanisms.memory_budget.planning.time_limit import OutOfTime
from retime.schedules.budget import OffloadPlan

# Predicted and measured times within these shares of the fastest count as equal.
_NEAR, _NEAR_MEASURED = 1.1, 1.04
# Sub-batch sizes that are tried out beside the best one's, and how much slower than it they may seem.
_FEW, _WORTH = 3, 2.0
MOST_TRIALS = _FEW + 2
"""The best, a few others, and one that moves nothing."""


@checked
def search_plan(
    step: TrainingStep,
    budget_bytes: Annotated[int, AtLeast(1)],
    *,
    sub_batches: tuple[int, ...] | None = None,
    costs: StepCosts | None = None,
    memory: StepMemory | None = None,
    trial: Callable[[PlanChoice], float | None] | None = None,
) -> PlanChoice:
    """Of the plans that fit and have nearly the shortest step the one that moves the fewest bytes.

    Args:
        step: what to run.
        budget_bytes: for everything: parameters, gradients, optimizer states, the batch, activations, scratch.
        sub_batches: sizes to choose from; by default :func:`part_sizes`. Give only the batch where sub-batches
            would change the result.
        costs: from ``calibrate``.
        memory: dry runs of the same step that were made before.
        trial: times a plan for real; asked about the best few by predicted time, at most :data:`MOST_TRIALS`. None, or
            one that cannot tell, leaves it at the prediction; :class:`OutOfTime` leaves it at what is known by then.

    Raises:
        BudgetError: the budget is below the floor.
    """
    memory = memory or StepMemory(step, sub_batches or part_sizes(step.samples), costs)
    costs = memory.costs
    plain_ms = costs.step_ms(step.samples, step.samples, 0, 0)
    memory.require(budget_bytes)
    if memory.plain is not None and step.samples in memory.sub_batches:
        peak = memory.plain.peak_with(costs.operations) + costs.scratch(step.samples)
        if peak <= budget_bytes - costs.spare_bytes:
            plan = OffloadPlan(step.samples, saved=len(memory.plain.saved))
            scratch, spare = costs.scratch(step.samples), costs.spare_bytes
            return PlanChoice(
                plan,
                0,
                peak,
                plain_ms,
                plain_ms,
                0,
                0,
                scratch_bytes=scratch,
                spare_bytes=spare,
                tensor_bytes=memory.plain.peak_bytes,
                small_bytes=memory.small_bytes(plan),
            )
    budget_bytes -= costs.spare_bytes
    candidates = _in_order(list(candidate_plans(memory, budget_bytes, plain_ms)))
    considered = tuple((choice.plan, choice.step_ms) for choice in candidates)
    found = filter(None, (with_exact_peak(memory, choice, budget_bytes) for choice in candidates))
    best = next(found, None)
    if best is None:  # what was measured varies; the floor's plan always runs
        best, trial = _at_floor(memory, plain_ms), None
    if trial is not None:
        others = (with_exact_peak(memory, choice, budget_bytes) for choice in _worth_a_trial(candidates, best))
        few = [best, *(choice for choice in others if choice is not None)]
        best = _tried(few, trial, costs.update_ms) if len(few) > 1 else best
    return replace(best, floor=memory.floor, considered=considered)


def _at_floor(memory: StepMemory, plain_ms: float) -> PlanChoice:
    floor = memory.floor
    spare = min(memory.costs.spare_bytes, floor.scratch_bytes)
    _, tensors = memory.exact_bytes(floor.plan)
    choice = predicted_choice(memory, floor.plan, 0, 0, plain_ms)
    return replace(
        choice,
        peak_bytes=floor.bytes - spare,
        scratch_bytes=floor.scratch_bytes - spare,
        spare_bytes=spare,
        tensor_bytes=tensors,
        small_bytes=memory.small_bytes(floor.plan),
    )


def _worth_a_trial(candidates: list[PlanChoice], best: PlanChoice) -> list[PlanChoice]:
    """The best of each of the next few sub-batch sizes, and of those that move nothing, which depends on no disk."""
    near = [choice for choice in candidates if choice.step_ms <= _WORTH * best.step_ms]
    rest: dict[int, PlanChoice] = {}
    for choice in near:
        if choice.plan.sub_batch != best.plan.sub_batch:
            rest.setdefault(choice.plan.sub_batch, choice)
    few = list(rest.values())[:_FEW]
    if all(choice.plan.offload for choice in (best, *few)):
        few += [choice for choice in near if not choice.plan.offload][:1]
    return few


def _tried(choices: list[PlanChoice], trial: Callable[[PlanChoice], float | None], update_ms: float) -> PlanChoice:
    """The best by measured times, if all can be measured: a measured and a predicted time say nothing together.

    Of those that were tried out, where there was no time for all.
    """
    times: list[float | None] = []
    with suppress(OutOfTime):
        for choice in choices:
            step_ms = trial(choice)
            times.append(step_ms)
    measured = [
        replace(choice, step_ms=step_ms + update_ms)
        for choice, step_ms in zip(choices, times, strict=False)
        if step_ms is not None
    ]
    return _in_order(measured, _NEAR_MEASURED)[0] if 0 < len(measured) == len(times) else choices[0]


def _in_order(candidates: list[PlanChoice], near_enough: float = _NEAR) -> list[PlanChoice]:
    """By time; those that differ by less than predictions, or measurements, are worth, by what they move.

    What a copy takes depends on everything else that uses the disk or the bus; of equal ones the largest sub-batch.
    """
    fastest = min((choice.step_ms for choice in candidates), default=0.0)

    def key(choice: PlanChoice) -> tuple[float, float, float, int]:
        near = choice.step_ms <= near_enough * fastest
        moved = choice.out_bytes + choice.in_bytes if near else 0
        return (fastest if near else choice.step_ms), moved, choice.step_ms, -choice.plan.sub_batch

    return sorted(candidates, key=key)
