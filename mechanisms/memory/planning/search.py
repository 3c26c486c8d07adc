"""The fastest plan within a budget: sub-batch size, what is offloaded, and how far ahead it is fetched.

The paper chooses the sub-batch first (Eq. 8) and then what moves (Algorithm 1). Here both are chosen together, by
predicted time, and what is chosen has been run dry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from retime.mechanisms.memory.dry_run import TrainingStep
from retime.mechanisms.memory.planning.costs import StepCosts
from retime.mechanisms.memory.planning.floor import MemoryFloor, StepMemory
from retime.mechanisms.memory.planning.time_limit import OutOfTime
from retime.schedules.budget import OffloadPlan

# How far ahead storages are fetched, and how many of the largest ones may be in flight: the fastest first.
_DEPTHS = (2, 1, 0)
# Predicted and measured times within these shares of the fastest count as equal.
_NEAR, _NEAR_MEASURED = 1.1, 1.04
# Dry runs for one candidate before it counts as too large.
_TRIES = 4
# What is held of the peak of a measured plan, and of one that is known from a dry run alone.
_UNEVEN, _UNMEASURED = 1 + 1 / 64, 1.25
# Sub-batch sizes that are tried out beside the best one's, and how much slower than it they may seem.
_FEW, _WORTH = 3, 2.0
MOST_TRIALS = _FEW + 2
"""The best, a few others, and one that moves nothing."""


@dataclass(frozen=True)
class PlanChoice:
    """A plan and what is expected of it.

    Attributes:
        plan: what to run.
        in_flight_bytes: for :class:`OffloadSavedTensors`.
        peak_bytes: tensors and scratch, by a dry run under this plan.
        scratch_bytes: of these, what is needed beside tensors and what operations allocate.
        spare_bytes: left free in the budget beside the peak; 0 where nothing was measured.
        tensor_bytes: of the peak of tensors alone; 0 where nothing can be run dry.
        step_ms: predicted time of a step.
        plain_ms: predicted time of the step without a plan.
        out_bytes, in_bytes: copied in a whole step.
        floor: the smallest budget; None where the plain step fits, and nobody asked.
        considered: plans that were predicted to fit, and their times.
    """

    plan: OffloadPlan
    in_flight_bytes: int
    peak_bytes: int
    step_ms: float
    plain_ms: float
    out_bytes: int
    in_bytes: int
    floor: MemoryFloor | None = None
    considered: tuple[tuple[OffloadPlan, float], ...] = ()
    scratch_bytes: int = 0
    spare_bytes: int = 0
    tensor_bytes: int = 0

    def held_bytes(self, budget_bytes: int) -> int:
        """What tensors, and what they have freed, are to hold together at most.

        A plan that was measured holds its peak, and a little more where the budget has room for it, as freed ranges do
        not fit the next tensors exactly; what operations need beside it stays free. One that was not measured has more
        room, which takes what a dry run does not see.
        """
        if not self.spare_bytes:
            return min(budget_bytes, int(_UNMEASURED * self.peak_bytes))
        needed = self.peak_bytes - self.scratch_bytes
        room = budget_bytes - self.scratch_bytes - self.spare_bytes
        return max(needed, min(int(_UNEVEN * needed), room))


def part_sizes(samples: int, smallest: int = 1) -> tuple[int, ...]:
    """The batch, and the largest of 2, 3, 4, 6, 8, 12 and so on equal parts of it, down to ``smallest``."""
    counts = {base << power for base in (1, 3) for power in range(samples.bit_length())}
    sizes = {-(-samples // count) for count in counts}
    return tuple(sorted((size for size in sizes if size >= smallest or size == samples), reverse=True))


def search_plan(
    step: TrainingStep,
    budget_bytes: int,
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
            )
    budget_bytes -= costs.spare_bytes
    candidates = _in_order(list(_candidates(memory, budget_bytes, plain_ms)))
    considered = tuple((choice.plan, choice.step_ms) for choice in candidates)
    found = filter(None, (_made_exact(memory, choice, budget_bytes) for choice in candidates))
    best = next(found, None)
    if best is None:  # what was measured varies; the floor's plan always runs
        best, trial = _at_floor(memory, plain_ms), None
    if trial is not None:
        others = (_made_exact(memory, choice, budget_bytes) for choice in _worth_a_trial(candidates, best))
        few = [best, *(choice for choice in others if choice is not None)]
        best = _tried(few, trial, costs.update_ms) if len(few) > 1 else best
    return replace(best, floor=memory.floor, considered=considered)


def _at_floor(memory: StepMemory, plain_ms: float) -> PlanChoice:
    floor = memory.floor
    spare = min(memory.costs.spare_bytes, floor.scratch_bytes)
    _, tensors = memory.exact_bytes(floor.plan)
    choice = _choice(memory, floor.plan, 0, 0, plain_ms)
    return replace(
        choice,
        peak_bytes=floor.bytes - spare,
        scratch_bytes=floor.scratch_bytes - spare,
        spare_bytes=spare,
        tensor_bytes=tensors,
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


def _candidates(memory: StepMemory, budget_bytes: int, plain_ms: float) -> Iterator[PlanChoice]:
    for sub_batch in memory.sub_batches:
        lives = memory.lifetimes(sub_batch)
        largest = max((one.plain.size.at(sub_batch) for one in lives.passes[0]), default=0)
        room = budget_bytes - memory.costs.scratch(sub_batch)
        for depth in _DEPTHS:
            numbers = smallest_offload(memory, sub_batch, depth, depth * largest, room)
            if numbers is None:
                continue
            plan = OffloadPlan(sub_batch, numbers, depth, len(lives.passes[0]))
            yield _choice(memory, plan, depth * largest, memory.peak_bytes(plan, depth * largest), plain_ms)
            if not numbers:
                break  # nothing moves: how is no matter


def smallest_offload(
    memory: StepMemory, sub_batch: int, prefetch: int, in_flight_bytes: int, room_bytes: int
) -> frozenset[int] | None:
    """Few bytes to offload so that tensors fit into ``room_bytes``; None if nothing helps.

    Storages are taken by size times the time that they lie idle, as many as are needed; those that turn out not to
    be needed are left out again, the largest first.
    """
    order = memory.lifetimes(sub_batch).order(sub_batch)

    def fits(numbers: frozenset[int]) -> bool:
        plan = OffloadPlan(sub_batch, numbers, prefetch, len(order))
        return memory.peak_bytes(plan, in_flight_bytes) <= room_bytes

    low, high = 0, len(order)
    if not fits(frozenset(order)):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(frozenset(order[:middle])):
            high = middle
        else:
            low = middle + 1
    chosen = frozenset(order[:low])
    for number in order[:low]:
        if fits(chosen - {number}):
            chosen -= {number}
    return chosen


def _choice(
    memory: StepMemory, plan: OffloadPlan, in_flight_bytes: int, peak_bytes: int, plain_ms: float
) -> PlanChoice:
    lives, samples = memory.lifetimes(plan.sub_batch), memory.step.samples
    out_bytes = lives.saved_bytes(plan.offload, plan.sub_batch)
    in_bytes = lives.read_bytes(plan.offload, plan.sub_batch)
    step_ms = memory.costs.step_ms(samples, plan.sub_batch, out_bytes, in_bytes, ahead=plan.prefetch > 0)
    count = -(-samples // plan.sub_batch)
    scratch = memory.costs.scratch(plan.sub_batch)
    moved = count * out_bytes, count * in_bytes
    return PlanChoice(
        plan,
        in_flight_bytes,
        peak_bytes + scratch,
        step_ms,
        plain_ms,
        *moved,
        scratch_bytes=scratch,
        spare_bytes=memory.costs.spare_bytes,
    )


def examined(memory: StepMemory, choice: PlanChoice) -> PlanChoice:
    """A plan from elsewhere with what it needs and moves here, for steps that can be run dry.

    What operations need beside tensors is taken from the choice.

    Raises:
        PlanMismatch: the step saves another number of storages.
    """
    run = memory.exact_run(choice.plan, choice.in_flight_bytes)
    tensors = max(memory.update_bytes, run.peak_bytes)
    count = -(-memory.step.samples // choice.plan.sub_batch)
    out_bytes, in_bytes = run.moved_bytes
    return replace(
        choice,
        tensor_bytes=tensors,
        peak_bytes=tensors + choice.peak_bytes - choice.tensor_bytes,
        out_bytes=count * out_bytes,
        in_bytes=count * in_bytes,
    )


def _made_exact(memory: StepMemory, choice: PlanChoice, budget_bytes: int) -> PlanChoice | None:
    """The choice with a dry run's peak; with more offloaded where the estimate was too low, or None."""
    scratch = memory.costs.scratch(choice.plan.sub_batch)
    plan, room = choice.plan, budget_bytes - scratch
    for _ in range(_TRIES):
        peak, tensors = memory.exact_bytes(plan, choice.in_flight_bytes)
        if peak <= budget_bytes - scratch:
            exact = _choice(memory, plan, choice.in_flight_bytes, peak, choice.plain_ms)
            return replace(exact, tensor_bytes=tensors)
        room -= peak - (budget_bytes - scratch)
        numbers = smallest_offload(memory, plan.sub_batch, plan.prefetch, choice.in_flight_bytes, room)
        if numbers is None or numbers == plan.offload:
            return None
        plan = replace(plan, offload=numbers)
    return None
