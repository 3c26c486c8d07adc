"""Dry runs of one step put together: its peak, its floor, and the peak under any plan (moDNN, section 5.1.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from retime.mechanisms.memory.costs import StepCosts
from retime.mechanisms.memory.lifetimes import Lifetimes
from retime.mechanisms.memory.profile import LargestTask, StepProfile
from retime.mechanisms.memory.replay import TrainingStep, profile_step, replay
from retime.mechanisms.memory.storages import tensors_in
from retime.mechanisms.memory.trace import ValueReadError
from retime.schedules.memory import OffloadPlan
from retime.schedules.memory.errors import BudgetError


@dataclass(frozen=True)
class MemoryFloor:
    """The least memory that a step can run in.

    Attributes:
        bytes: the smallest budget: tensors and scratch.
        sub_batch: with so many samples at once.
        resident_bytes: of these, parameters, buffers, gradients, optimizer states and the batch.
        scratch_bytes: of these, what operations need for themselves.
        task: the operation that needs the most.
    """

    bytes: int
    sub_batch: int
    resident_bytes: int
    scratch_bytes: int
    task: LargestTask

    def require(self, budget_bytes: int) -> None:
        """Refuse a budget below the floor.

        Raises:
            BudgetError: it is.
        """
        if budget_bytes >= self.bytes:
            return
        if self.resident_bytes > self.task.nbytes + self.scratch_bytes:
            hint = (
                f"{self.resident_bytes} bytes of them are parameters, gradients, optimizer states and the batch: an "
                "optimizer with less state, a smaller batch or parameters in a smaller dtype would help"
            )
        elif self.sub_batch > 1:
            hint = f"The step runs {self.sub_batch} samples at once; smaller sub-batches, if allowed, would help"
        else:
            hint = f"That layer alone needs {self.task.nbytes} bytes for one sample: smaller samples would help"
        raise BudgetError(
            f"a budget of {budget_bytes} bytes is below this step's floor",
            floor_bytes=self.bytes,
            task=f"{self.task.name} ({self.task.phase})",
            layer=self.task.layer,
            hint=hint,
        )


class StepMemory:
    """What a step needs under any plan, from a few dry runs that are made when they are needed.

    Where the step reads values, so that it cannot be run dry, small real runs on copies take their place, and sizes
    for larger sub-batches follow from two of them; :attr:`note` says so.

    Args:
        step: the step.
        sub_batches: sub-batch sizes that may be used; only the whole batch where sub-batches would change the result.
            Sizes below the batch are at most half of it.
        costs: their scratch is added to what tensors hold.

    Attributes:
        note: why predictions are not exact; empty if they are.
    """

    def __init__(self, step: TrainingStep, sub_batches: tuple[int, ...], costs: StepCosts | None = None) -> None:
        self.step = step
        self.costs = costs or StepCosts()
        self.sub_batches = tuple(sorted({size for size in sub_batches if size <= step.samples // 2} | ({step.samples})))
        if step.samples not in sub_batches and len(self.sub_batches) > 1:
            self.sub_batches = self.sub_batches[:-1]
        self.note = ""

    @cached_property
    def plain(self) -> StepProfile | None:
        """The whole batch with nothing offloaded; None where the step cannot be run dry."""
        try:
            return profile_step(self.step)
        except ValueReadError as error:
            self.note = f"{error}: predicted from real runs on one and two samples"
            return None

    @cached_property
    def floor(self) -> MemoryFloor:
        """Everything offloaded, the smallest sub-batch, nothing fetched ahead."""
        smallest = self.sub_batches[0]
        away = self._away(smallest)
        scratch = self.costs.scratch(smallest)
        tensors = min(self.peak_bytes(self.plan(smallest, all_of=True)), self.peak_bytes(self.plan(smallest)))
        return MemoryFloor(tensors + scratch, smallest, away.resident_bytes, scratch, away.largest_task)

    def lifetimes(self, sub_batch: int) -> Lifetimes:
        """Lives of storages for the whole batch at once, or for parts of it."""
        return self._whole if sub_batch == self.step.samples else self._parts

    def plan(self, sub_batch: int, *, all_of: bool = False) -> OffloadPlan:
        """Nothing, or everything, offloaded."""
        saved = len(self.lifetimes(sub_batch).passes[0])
        return OffloadPlan(sub_batch, frozenset(range(saved)) if all_of else frozenset(), 0, saved)

    def peak_bytes(self, plan: OffloadPlan, in_flight_bytes: int = 0) -> int:
        """What tensors hold at most under a plan, estimated; copies ahead count as if none were still in flight."""
        return self.lifetimes(plan.sub_batch).peak_bytes(plan, in_flight_bytes)

    def exact_peak_bytes(self, plan: OffloadPlan, in_flight_bytes: int = 0) -> int:
        """The same by a dry run, or by the estimate where there is none."""
        if self.plain is None:
            return self.peak_bytes(plan, in_flight_bytes)
        return replay(self.step, plan, in_flight_bytes=in_flight_bytes).peak_bytes

    @cached_property
    def _whole(self) -> Lifetimes:
        samples = self.step.samples
        if self.plain is not None:
            return Lifetimes(self.plain, self._away(samples))
        one, two = self.step.of_size(1), self.step.of_size(min(2, samples))
        return Lifetimes(
            profile_step(one, real=True),
            _everything_away(one, 1, real=True),
            profile_step(two, real=True),
            batch_bytes=self._batch_bytes,
        )

    @cached_property
    def _parts(self) -> Lifetimes:
        low, *_, high = [size for size in self.sub_batches if size < self.step.samples] * 2
        if self.plain is not None:
            larger = profile_step(self.step, high) if high != low else None
            return Lifetimes(profile_step(self.step, low), self._away(low), larger)
        small, large = self.step.of_size(2 * low), self.step.of_size(min(4 * low, self.step.samples))
        return Lifetimes(
            profile_step(small, low, real=True),
            _everything_away(small, low, real=True),
            profile_step(large, large.samples // 2, real=True),
            batch_bytes=self._batch_bytes,
        )

    def _away(self, sub_batch: int) -> StepProfile:
        known = self.__dict__.setdefault("_away_runs", {})
        if sub_batch not in known:
            if self.plain is not None:
                known[sub_batch] = _everything_away(self.step, sub_batch)
            else:
                known[sub_batch] = _everything_away(self.step.of_size(sub_batch), sub_batch, real=True)
        result: StepProfile = known[sub_batch]
        return result

    @property
    def _batch_bytes(self) -> int:
        return sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(self.step.batch)}.values()
        )


# More storages than any step saves: numbers beyond the last one name nothing.
_ALL = frozenset(range(100_000))


def _everything_away(step: TrainingStep, sub_batch: int, *, real: bool = False) -> StepProfile:
    return replay(step, OffloadPlan(sub_batch, _ALL, 0, saved=len(_ALL)), real=real, compare=False)
