"""A plan and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass

from retime.mechanisms.memory_budget.planning.floor import MemoryFloor
from retime.schedules.budget import OffloadPlan

# What is held of the peak of a measured plan, and of one that is known from a dry run alone.
_UNEVEN, _UNMEASURED = 1 + 1 / 64, 1.25


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
        small_bytes: of these, by how much the peak is lower without the tensors that the step makes and that are too
            small for the pool. The C library's heap holds them, beside what is reserved.
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
    small_bytes: int = 0

    def reserved_bytes(self, budget_bytes: int) -> int:
        """What live tensors of the pool, and freed memory cached for the next ones, may take together at most.

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
