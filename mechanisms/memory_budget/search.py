"""The fastest plan within a budget: sub-batch size, what is offloaded, and how far ahead it is fetched.

The paper chooses the sub-batch first (Eq. 8) and then what moves (Algorithm 1). Here both are chosen together, by
predicted time, and what is chosen has been run dry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated

import torch

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.cpu_pool import within
from retime.foundations.storages import strided_bytes
from retime.mechanisms.memory_budget.dry_run import DryRun, StepProfile, TrainingStep
from retime.mechanisms.memory_budget.offload import HostTier
from retime.mechanisms.memory_budget.step_memory import MemoryFloor, StepMemory
from retime.schedules.budget import BlockKind, BudgetError, OffloadPlan

# A plan and what is expected of it.

# What is held of the peak of a measured plan, and of one that is known from a dry run alone.
_UNEVEN, _UNMEASURED = 1 + 1 / 64, 1.25


@dataclass(frozen=True)
class PlanChoice:
    """A plan and what is expected of it.

    Attributes:
        in_flight_bytes: for :class:`OffloadSavedTensors`.
        peak_bytes: tensors and scratch, by a dry run under this plan.
        scratch_bytes: of these, what is needed beside tensors and what operations allocate.
        spare_bytes: left free in the budget beside the peak; 0 where nothing was measured.
        tensor_bytes: of the peak of tensors alone; 0 where nothing can be run dry.
        small_bytes: of these, by how much the peak is lower without the tensors that the step makes and that are too
            small for the pool. The C library's heap holds them, beside what is reserved.
        step_ms: predicted time of a step.
        plain_ms: predicted time of the step without a plan.
        out_bytes, in_bytes: copied in a whole step.
        floor: the smallest budget; None where the plain step fits, and nobody asked.
    """

    plan: OffloadPlan
    in_flight_bytes: int = 0
    peak_bytes: int = 0
    step_ms: float = 0.0
    plain_ms: float = 0.0
    out_bytes: int = 0
    in_bytes: int = 0
    floor: MemoryFloor | None = None
    scratch_bytes: int = 0
    spare_bytes: int = 0
    tensor_bytes: int = 0
    small_bytes: int = 0

    def reserved_bytes(self, budget_bytes: int) -> int:
        """Bytes that live tensors of the pool, and freed memory cached for the next ones, may take together at most.

        A plan that was measured holds its peak, and a little more where the budget has room for it, as freed ranges do
        not fit the next tensors exactly; what operations need beside it stays free. One that was not measured has more
        room, which takes what a dry run does not see.
        """
        if not self.spare_bytes:
            return min(budget_bytes, int(_UNMEASURED * self.peak_bytes))
        beside = self.scratch_bytes + self.small_bytes
        needed = self.peak_bytes - beside
        room = budget_bytes - beside - self.spare_bytes
        return max(needed, min(int(_UNEVEN * needed), room))


# Plans that fit into a budget, by prediction and by a dry run under the plan itself.

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
    """The plan that offloads least for each sub-batch size and depth of prefetching, as far as one fits.

    Args:
        budget_bytes: for the step, without what is to stay free.
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
    samples, (out_bytes, in_bytes) = memory.step.samples, memory.lifetimes(plan.sub_batch).moved_bytes(plan)
    step_ms = memory.costs.step_ms(samples, plan.sub_batch, out_bytes, in_bytes, ahead=plan.prefetch > 0)
    count = -(-samples // plan.sub_batch)
    scratch = memory.costs.scratch(plan.sub_batch)
    return PlanChoice(
        plan,
        in_flight_bytes,
        peak_bytes + scratch,
        step_ms,
        plain_ms,
        count * out_bytes,
        count * in_bytes,
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


# A plan from one step that was trained with everything offloaded, where nothing may be tried out.

_USED = 0.8
"""So much of the budget is given away: other batches of the shape, and the update, may need more than was measured."""


def plan_after(samples: int, sizes: Sequence[int], needed_bytes: int | None, budget_bytes: int) -> PlanChoice:
    """Choice of what stays on the device from the second step on.

    What was saved last is needed first and lies idle the shortest, so that stays, as long as there is room.

    Args:
        sizes: bytes of each storage that the step saved, by number.
        needed_bytes: the most that the step held, everything offloaded; None where it cannot be measured: then all of
            it goes away again.

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
    peak_bytes = budget_bytes if needed_bytes is None else needed_bytes + sum(sizes) - moved
    in_flight_bytes = largest if ahead and away else 0
    peak_bytes += 2 * in_flight_bytes
    plan = OffloadPlan(samples, frozenset(away), int(ahead), len(sizes))
    return PlanChoice(plan, in_flight_bytes, peak_bytes, out_bytes=moved, in_bytes=moved, tensor_bytes=peak_bytes)


# Candidates for a plan run for real, a sub-batch each, because predicted times miss what caches and disks do.

_REPEATS = 3
_ENOUGH_S = 1.0


class PlanTrial:
    """Times candidates on the model's own parameters, without changing anything.

    Args:
        step: what to run. Its state, and the random generators, stay as they are.
        plain: a dry run of the whole batch; None where there is none.
        budget_bytes: what the step may need, with parameters and the batch.

    Attributes:
        note: why a plan was not tried out that should have been; empty if all were.
    """

    def __init__(self, step: TrainingStep, host: HostTier, plain: StepProfile | None, budget_bytes: int) -> None:
        self._step, self._host, self._budget_bytes = step, host, budget_bytes
        self.note = ""
        self._absent_bytes = step.reduction_bytes  # what training holds and a trial does not
        if plain is not None:
            trained = (parameter for parameter in step.module.parameters() if parameter.requires_grad)
            self._absent_bytes += strided_bytes(trained) if step.buckets else 0
            self._absent_bytes += sum(one.nbytes for one in plain.trace.storages if one.kind is BlockKind.STATE)
        # A step that writes into what it is given needs copies, for which there may be no room.
        self._possible = plain is not None and not plain.trace.writes_parameters and not plain.trace.writes_batch

    def step_ms(self, choice: PlanChoice) -> float | None:
        """Milliseconds of all forward and backward passes of a step under a plan; None where it cannot be tried out."""
        if not self._possible:
            return None
        size = choice.plan.sub_batch
        part = replace(self._step.of_size(size), optimizers=(), gradients="freed", buckets="", reduction_bytes=0)
        run = DryRun(part, real=True, host=self._host, in_place=True, own_batch=False)
        times: list[float] = []
        try:
            with within(self._step.given(), choice.reserved_bytes(self._budget_bytes) - self._absent_bytes):
                run.untraced(choice.plan, in_flight_bytes=choice.in_flight_bytes)  # libraries generate code at first
                while len(times) < _REPEATS and sum(times) < _ENOUGH_S:
                    begin = time.perf_counter()
                    run.untraced(choice.plan, in_flight_bytes=choice.in_flight_bytes)
                    times.append(time.perf_counter() - begin)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                self.note = "chosen by predicted times: there was no room to try plans out"
                return None  # the first time needs what libraries load beside the plan
            raise
        return 1e3 * min(times) * self._step.samples / size


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
    memory: StepMemory | None = None,
    trial: Callable[[PlanChoice], float | None] | None = None,
) -> PlanChoice:
    """Choose, of the plans that fit and have nearly the shortest step, the one that moves the fewest bytes.

    Args:
        step: what to run.
        budget_bytes: for everything: parameters, gradients, optimizer states, the batch, activations, scratch.
        memory: of the same step, with the sub-batch sizes to choose from and what ``calibrate`` has measured; by
            default of :func:`part_sizes`, and nothing measured.
        trial: times a plan for real; asked about the best few by predicted time, at most :data:`MOST_TRIALS`. None, or
            one that cannot tell, leaves it at the prediction.

    Raises:
        BudgetError: the budget is below the floor.
    """
    memory = memory or StepMemory(step, part_sizes(step.samples))
    costs = memory.costs
    plain_ms = costs.step_ms(step.samples, step.samples, 0, 0)
    memory.require(budget_bytes)
    if memory.plain is not None and step.samples in memory.sub_batches:
        scratch = costs.scratch(step.samples)
        peak = memory.plain.peak_with(costs.operations) + scratch
        if peak <= budget_bytes - costs.spare_bytes:
            plan = OffloadPlan(step.samples, saved=len(memory.plain.saved))
            return PlanChoice(
                plan,
                peak_bytes=peak,
                step_ms=plain_ms,
                plain_ms=plain_ms,
                scratch_bytes=scratch,
                spare_bytes=costs.spare_bytes,
                tensor_bytes=memory.plain.peak_bytes,
                small_bytes=memory.small_bytes(plan),
            )
    budget_bytes -= costs.spare_bytes
    candidates = _in_order(list(candidate_plans(memory, budget_bytes, plain_ms)))
    fitting = filter(None, (with_exact_peak(memory, choice, budget_bytes) for choice in candidates))
    best = next(fitting, None)
    if best is None:  # what was measured varies; the floor's plan always runs
        best, trial = _at_floor(memory, plain_ms), None
    if trial is not None:
        others = (with_exact_peak(memory, choice, budget_bytes) for choice in _worth_a_trial(candidates, best))
        best = _tried(best, filter(None, others), trial, costs.update_ms)
    return replace(best, floor=memory.floor)


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


def _tried(
    best: PlanChoice, others: Iterator[PlanChoice], trial: Callable[[PlanChoice], float | None], update_ms: float
) -> PlanChoice:
    """The best by measured times, if all can be measured: a measured and a predicted time say nothing together."""
    second = next(others, None)
    if second is None:
        return best
    measured = []
    for choice in chain((best, second), others):
        step_ms = trial(choice)
        if step_ms is None:
            return best  # others, each a dry run, need not be asked for
        measured.append(replace(choice, step_ms=step_ms + update_ms))
    return _in_order(measured, _NEAR_MEASURED)[0]


def _in_order(candidates: list[PlanChoice], near_enough: float = _NEAR) -> list[PlanChoice]:
    """Sort by time; those that differ by less than predictions, or measurements, are worth, by what they move.

    What a copy takes depends on everything else that uses the disk or the bus; of equal ones the largest sub-batch.
    """
    fastest = min((choice.step_ms for choice in candidates), default=0.0)

    def key(choice: PlanChoice) -> tuple[float, float, float, int]:
        near = choice.step_ms <= near_enough * fastest
        moved = choice.out_bytes + choice.in_bytes if near else 0
        return (fastest if near else choice.step_ms), moved, choice.step_ms, -choice.plan.sub_batch

    return sorted(candidates, key=key)
