"""Finds the floor of a step, when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from retime.mechanisms.memory_budget.dry_run import LargestTask, Size, StepProfile
from retime.mechanisms.memory_budget.planning.costs import StepCosts
from retime.mechanisms.memory_budget.planning.floor import MemoryFloor
from retime.mechanisms.memory_budget.planning.step_runs import StepRuns

_NEVER = 2**62


class FloorSearch:
    """The floor of a step, which need not be found out for a budget that the plain step fits into.

    Args:
        runs: dry runs of the step.
        least: what the floor's plan needs beside its tensors.
        most_bytes: budgets of so much are accepted without asking for the floor, so it is no higher; None: unknown.
    """

    def __init__(self, runs: StepRuns, least: StepCosts, most_bytes: int | None = None) -> None:
        self._runs, self._least = runs, least
        self._most_bytes = _NEVER if most_bytes is None else most_bytes

    def require(self, budget_bytes: int) -> None:
        """Refuse a budget below the floor.

        Raises:
            BudgetError: it is.
        """
        if budget_bytes < self._roof_bytes:
            self.floor.require(budget_bytes)

    @cached_property
    def floor(self) -> MemoryFloor:
        """Everything offloaded, the smallest sub-batch, nothing fetched ahead; never more than the plain step needs."""
        smallest, least = self._runs.sub_batches[0], self._least
        plans = [self._runs.plan(smallest, all_of=True), self._runs.plan(smallest)]
        plan = min(plans, key=lambda one: self._runs.peak_bytes(one, 0, least.operations))
        needed, _ = self._runs.exact_bytes(plan, 0, least.operations)
        if self._plain_peak_bytes < needed:
            plan, needed = self._runs.plan(self._runs.step.samples), self._plain_peak_bytes
        offloaded_run = self._runs.offloaded(smallest)
        nbytes = min(needed + least.scratch(smallest), self._roof_bytes)
        return MemoryFloor(
            nbytes,
            plan.sub_batch,
            offloaded_run.resident_bytes,
            max(0, nbytes - needed),
            _largest_task(offloaded_run, least),
            no_offload=self._runs.no_offload,
            plan=plan,
        )

    @property
    def _plain_peak_bytes(self) -> int:
        plain = self._runs.plain
        if plain is None or self._runs.step.samples not in self._runs.sub_batches:
            return _NEVER
        return plain.peak_with(self._least.operations)

    @property
    def _roof_bytes(self) -> int:
        """No budget of so much is refused."""
        return min(self._plain_peak_bytes + self._least.spare_bytes, self._most_bytes)


def _largest_task(profile: StepProfile, costs: StepCosts) -> LargestTask:
    """With what operations allocate for themselves, which may make another one the largest than tensors alone do."""
    if not costs.operations:
        return profile.largest_task
    operations, none = profile.trace.operations, Size(0)
    own = [costs.operations.get(one.kind, none).at(profile.plan.sub_batch) for one in operations]
    needs = [held + extra for held, extra in zip(profile.held_bytes(), own, strict=True)]
    at = max(range(len(needs)), key=needs.__getitem__, default=-1)
    if at < 0 or needs[at] <= profile.peak_bytes:
        return profile.largest_task
    found = replace(profile, trace=replace(profile.trace, peak_at=at)).largest_task
    return replace(found, nbytes=found.nbytes + own[at])
