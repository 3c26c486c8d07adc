"""Plans that fit into a budget, by prediction and by a dry run under the plan itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from retime.foundations.arguments import AtLeast, checked
from retime.mechanisms.memory_budget.planning.choice import PlanChoice
from retime.mechanisms.memory_budget.planning.step_memory import StepMemory
from retime.schedules.budget import OffloadPlan

# How far ahead storages are fetched, and how many of the largest ones may be in flight: the fastest first.
_DEPTHS = (2, 1, 0)
# Dry runs for one candidate before it counts as too large.
_TRIES = 4


@checked
def part_sizes(samples: Annotated[int, AtLeast(1)], smallest: Annotated[int, AtLeast(1)] = 1) -> tuple[int, ...]:
    """The batch, and the largest of 2, 3, 4, 6, 8, 12 and so on equal parts of it, down to ``smallest``."""
    counts = {base << power for base in (1, 3) for power in range(samples.bit_length())}
    sizes = {-(-samples // count) for count in counts}
    return tuple(sorted((size for size in sizes if size >= smallest or size == samples), reverse=True))


def candidate_plans(memory: StepMemory, budget_bytes: int, plain_ms: float) -> Iterator[PlanChoice]:
    """For each sub-batch size and depth of prefetching the plan that offloads least, as far as one fits.

    Args:
        memory: what the step needs.
        budget_bytes: for the step, without what is to stay free.
        plain_ms: predicted time of the step without a plan.
    """
    for sub_batch in memory.sub_batches:
        lives = memory.lifetimes(sub_batch)
        largest = max((one.plain.size.at(sub_batch) for one in lives.passes[0]), default=0)
        room = budget_bytes - memory.costs.scratch(sub_batch)
        for depth in _DEPTHS:
            numbers = smallest_offload(memory, sub_batch, depth, depth * largest, room)
            if numbers is None:
                continue
            plan = OffloadPlan(sub_batch, numbers, depth, len(lives.passes[0]))
            yield predicted_choice(memory, plan, depth * largest, memory.peak_bytes(plan, depth * largest), plain_ms)
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


def predicted_choice(
    memory: StepMemory, plan: OffloadPlan, in_flight_bytes: int, peak_bytes: int, plain_ms: float
) -> PlanChoice:
    """A plan with its predicted times and what it moves; ``peak_bytes`` is what tensors and operations hold."""
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
        small_bytes=memory.small_bytes(choice.plan, choice.in_flight_bytes),
        peak_bytes=tensors + choice.peak_bytes - choice.tensor_bytes,
        out_bytes=count * out_bytes,
        in_bytes=count * in_bytes,
    )


def with_exact_peak(memory: StepMemory, choice: PlanChoice, budget_bytes: int) -> PlanChoice | None:
    """The choice with a dry run's peak; with more offloaded where the estimate was too low, or None."""
    scratch = memory.costs.scratch(choice.plan.sub_batch)
    plan, room = choice.plan, budget_bytes - scratch
    for _ in range(_TRIES):
        peak, tensors = memory.exact_bytes(plan, choice.in_flight_bytes)
        if peak <= budget_bytes - scratch:
            exact = predicted_choice(memory, plan, choice.in_flight_bytes, peak, choice.plain_ms)
            return replace(exact, tensor_bytes=tensors, small_bytes=memory.small_bytes(plan, choice.in_flight_bytes))
        room -= peak - (budget_bytes - scratch)
        numbers = smallest_offload(memory, plan.sub_batch, plan.prefetch, choice.in_flight_bytes, room)
        if numbers is None or numbers == plan.offload:
            return None
        plan = replace(plan, offload=numbers)
    return None
