"""What a step needs under any plan: its peak, its floor, and the peak under a plan (moDNN, section 5.1.1)."""

from __future__ import annotations

from retime.mechanisms.memory_budget.dry_run import Lifetimes, StepProfile, TrainingStep
from retime.mechanisms.memory_budget.planning.costs import StepCosts
from retime.mechanisms.memory_budget.planning.floor import MemoryFloor
from retime.mechanisms.memory_budget.planning.floor_search import FloorSearch
from retime.mechanisms.memory_budget.planning.step_runs import StepRuns
from retime.schedules.budget import OffloadPlan


class StepMemory:
    """What a step needs under any plan: what its runs hold, and what operations and allocators need beside that.

    Args:
        step: the step.
        sub_batches: sub-batch sizes that may be used; only the whole batch where sub-batches would change the result.
            Sizes below the batch are at most half of it, rounded up.
        costs: what operations need is added to what tensors hold.
        check: compare a dry run of the smallest sub-batch with a real one on copies. Some kernels save another number
            of tensors than their description says (oneDNN's LSTM a work space); then real runs are used.
        runs: instead of new ones of ``step``, for ``sub_batches``.
        floor: by default the floor with what ``costs`` say.
    """

    def __init__(
        self,
        step: TrainingStep,
        sub_batches: tuple[int, ...],
        costs: StepCosts | None = None,
        *,
        check: bool = False,
        runs: StepRuns | None = None,
        floor: FloorSearch | None = None,
    ) -> None:
        self.step = step
        self.costs = costs or StepCosts()
        self._runs = runs or StepRuns(step, sub_batches, check=check)
        self.sub_batches = self._runs.sub_batches
        self._floor = floor or FloorSearch(self._runs, _least_of(self.costs, self.sub_batches[0]))

    @property
    def plain(self) -> StepProfile | None:
        """The whole batch with nothing offloaded; None where the step cannot be run dry."""
        return self._runs.plain

    @property
    def note(self) -> str:
        """Why predictions are not exact, or nothing can be offloaded; empty if they are, and storages can."""
        return self._runs.note

    @property
    def not_run(self) -> list[str]:
        """Classes of optimizers whose states are not known, because they could not be run by themselves."""
        return self._runs.not_run

    @property
    def update_bytes(self) -> int:
        """What is held during the optimizers' updates."""
        return self._runs.update_bytes

    def require(self, budget_bytes: int) -> None:
        """Refuse a budget below the floor, which need not be found out for one that the plain step fits into.

        Raises:
            BudgetError: it is.
        """
        self._floor.require(budget_bytes)

    @property
    def floor(self) -> MemoryFloor:
        """Everything offloaded, the smallest sub-batch, nothing fetched ahead; never more than the plain step needs."""
        return self._floor.floor

    def lifetimes(self, sub_batch: int) -> Lifetimes:
        """Lives of storages for the whole batch at once, or for parts of it."""
        return self._runs.lifetimes(sub_batch)

    def plan(self, sub_batch: int, *, all_of: bool = False) -> OffloadPlan:
        """Nothing, or everything, offloaded."""
        return self._runs.plan(sub_batch, all_of=all_of)

    def peak_bytes(self, plan: OffloadPlan, in_flight_bytes: int = 0) -> int:
        """What tensors and operations hold at most under a plan, put together from the dry runs."""
        return self._runs.peak_bytes(plan, in_flight_bytes, self.costs.operations)

    def exact_bytes(self, plan: OffloadPlan, in_flight_bytes: int = 0) -> tuple[int, int]:
        """The same by a dry run under this very plan, or put together where there is none; and of tensors alone.

        The second number is 0 where nothing can be run dry.
        """
        return self._runs.exact_bytes(plan, in_flight_bytes, self.costs.operations)

    def small_bytes(self, plan: OffloadPlan, in_flight_bytes: int = 0) -> int:
        """By how much the peak is lower without the tensors that a pool leaves to the C library; 0 where unknown."""
        return self._runs.small_bytes(plan, in_flight_bytes, self.costs.operations)

    def exact_run(self, plan: OffloadPlan, in_flight_bytes: int = 0) -> StepProfile:
        """A dry run under this very plan, without the update, for steps that can be run dry."""
        return self._runs.exact_run(plan, in_flight_bytes)

    def with_sizes(self, sub_batches: tuple[int, ...], costs: StepCosts, *, check: bool) -> StepMemory:
        """The same step with other arguments; its dry run of the whole batch is not made again."""
        runs = StepRuns(self.step, sub_batches, check=check, earlier=self._runs)
        return StepMemory(self.step, sub_batches, costs, runs=runs)

    def with_least(self, least: StepCosts, most_bytes: int | None = None) -> StepMemory:
        """The same runs with a floor by other costs than the step's.

        Args:
            least: measured for the floor; see :func:`least_costs`.
            most_bytes: budgets of so much are accepted without asking for the floor, so it is no higher; None: unknown.
        """
        floor = FloorSearch(self._runs, least, most_bytes)
        return StepMemory(self.step, self.sub_batches, self.costs, runs=self._runs, floor=floor)

    def with_costs(self, costs: StepCosts) -> StepMemory:
        """The same runs and the same floor with other costs, once they have been measured."""
        return StepMemory(self.step, self.sub_batches, costs, runs=self._runs, floor=self._floor)


def _least_of(costs: StepCosts, smallest: int) -> StepCosts:
    """Without any measured for the purpose those of the step."""
    scratch = costs.scratch(smallest) + costs.spare_bytes
    return StepCosts(operations=costs.operations, scratch_bytes=scratch, spare_bytes=scratch)
