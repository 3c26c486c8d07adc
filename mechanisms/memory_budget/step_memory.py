"""What a step needs under any plan: its peak, its floor, and the peak under a plan (moDNN, section 5.1.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

from retime.foundations.cpu_pool import POOLED_BYTES
from retime.foundations.parts import sizes_of
from retime.foundations.storages import has_storage, tensors_in
from retime.foundations.torch_private.tensors import storage_address
from retime.mechanisms.memory_budget.costs import StepCosts, fewest_samples
from retime.mechanisms.memory_budget.dry_run import (
    DryRun,
    LargestTask,
    Lifetimes,
    Size,
    StepProfile,
    TrainingStep,
    everything,
)
from retime.mechanisms.memory_budget.offload import HostNone, NoHooksError
from retime.schedules.budget import BudgetError, OffloadPlan, Phase, sized
from retime.schedules.errors import ScheduleError

# The least memory that a step can run in, and the refusal of a budget below it.


@dataclass(frozen=True)
class MemoryFloor:
    """The least memory that a step can run in.

    Attributes:
        bytes: the smallest budget: every smaller one is refused, and this one is not.
        sub_batch: with so many samples at once.
        resident_bytes: of these, parameters, buffers, gradients, optimizer states and the batch.
        scratch_bytes: of these, what is needed beside tensors and what operations allocate.
        task: the operation that needs the most.
        no_offload: why nothing can be offloaded; empty if storages can.
        plan: what runs in the floor.
    """

    bytes: int
    sub_batch: int
    resident_bytes: int
    scratch_bytes: int
    task: LargestTask
    no_offload: str = ""
    plan: OffloadPlan = field(default_factory=lambda: OffloadPlan(1))

    def refusal(self, budget_bytes: int, fewer: str | None = None) -> BudgetError:
        """The error that says why a budget is too small.

        Args:
            fewer: how fewer samples at once could run, or why they cannot; None: the caller chooses sub-batch sizes.
        """
        if fewer is None:
            fewer = f"The step runs {self.sub_batch} samples at once; smaller sub-batches, if allowed, would help"
        staying = (
            f"{sized(self.resident_bytes)} of them are parameters, gradients, optimizer states and the batch: an "
            "optimizer with less state, a smaller batch or parameters in a smaller dtype would help"
        )
        mostly_stays = self.resident_bytes > self.task.nbytes + self.scratch_bytes
        hints = [staying] if mostly_stays else []
        if self.sub_batch > 1 and fewer and not (mostly_stays and self.resident_bytes >= budget_bytes):
            hints.append(fewer)
        samples = f"{self.sub_batch} samples" if self.sub_batch > 1 else "one sample"
        alone = f"That layer alone needs {sized(self.task.nbytes)} for {samples}: smaller samples would help"
        return BudgetError(
            f"a budget of {sized(budget_bytes)} is below this step's floor",
            floor_bytes=self.bytes,
            task=f"{self.task.name} ({self.task.phase})",
            layer=self.task.layer,
            hint=". ".join([*(hints or [alone]), *filter(None, [self.no_offload[:1].upper() + self.no_offload[1:]])]),
            samples=self.sub_batch,
        )


# What a step needs: dry runs of it, made when they are needed; small real runs on copies where it cannot be run dry.

# Samples of a real run, where the batch is to stay whole: one may be too few for batch statistics.
_FEW = 2
_NEVER = 2**62

Operations = Mapping[tuple[Phase, str, str], Size]
"""What operations allocate for themselves, by phase, layer and name."""

_Result = TypeVar("_Result")


def _once(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Kept with the object: its class would hold every model that was ever planned for, and so would a cycle."""

    @wraps(method)
    def kept(self: StepMemory, *arguments: int) -> _Result:
        key = (method.__name__, *arguments)
        if key not in self._done:
            self._done[key] = method(self, *arguments)
        result: _Result = self._done[key]
        return result

    return kept


class StepMemory:
    """Memory that a step needs under any plan: for tensors, and for operations and allocators beside them.

    It follows from a few dry runs. Where the step reads values, so that it cannot be run dry, small real runs on copies
    take their place, and sizes for larger sub-batches follow from two of them; :attr:`note` says so.

    Args:
        sub_batches: sub-batch sizes that may be used; only the whole batch where sub-batches would change the result.
            Sizes below the batch are at most half of it, rounded up.
        costs: what operations need is added to what tensors hold; may be set anew, once it is measured.
        check: compare a dry run of the smallest sub-batch with a real one on copies. Some kernels save another number
            of tensors than their description says (oneDNN's LSTM a work space); then real runs are used.
        earlier: of the same step for other sizes: its dry run of the whole batch is not made again.

    Attributes:
        note: why predictions are not exact, or nothing can be offloaded; empty if they are, and storages can.
        no_offload: what of that is about offloading. Dry runs are then without hooks, and know nothing that is saved.
    """

    def __init__(
        self,
        step: TrainingStep,
        sub_batches: tuple[int, ...],
        costs: StepCosts | None = None,
        *,
        check: bool = False,
        earlier: StepMemory | None = None,
    ) -> None:
        self.step = step
        self.costs = costs or StepCosts()
        self._check = check
        self.sub_batches = tuple(
            sorted({size for size in sub_batches if size <= -(-step.samples // 2)} | {step.samples})
        )
        if step.samples not in sub_batches and len(self.sub_batches) > 1:
            self.sub_batches = self.sub_batches[:-1]
        # Without any measured for the purpose the floor has the costs of the step.
        scratch = self.costs.scratch(self.sub_batches[0]) + self.costs.spare_bytes
        self._floor_costs = StepCosts(operations=self.costs.operations, scratch_bytes=scratch, spare_bytes=scratch)
        self._most_bytes = _NEVER
        self._floor: MemoryFloor | None = None
        self.note = self.no_offload = ""
        self._host: HostNone | None = None
        self._dry_run: DryRun | None = None
        self._profile: StepProfile | None = None
        self._exact: tuple[OffloadPlan, int, StepProfile] | None = None
        self._not_run_really: list[str] = []
        self._done: dict[tuple[Any, ...], Any] = {}
        if earlier is not None:
            if earlier.plain is not None:
                self._dry_run, self._profile = earlier._dry_run, earlier._profile
            self.note = self.no_offload = earlier.no_offload
            self._host = earlier._host

    def find_floor_by(self, least: StepCosts, most_bytes: int | None = None) -> None:
        """Have a floor by other costs than the step's.

        Args:
            least: what the floor's plan needs beside its tensors, measured for it; see :func:`least_costs`.
            most_bytes: budgets of so much are accepted without asking for the floor, so it is no higher; None: unknown.
        """
        self._floor_costs, self._most_bytes = least, _NEVER if most_bytes is None else most_bytes
        self._floor = None

    @cached_property
    def plain(self) -> StepProfile | None:
        """The whole batch with nothing offloaded; None where the step cannot be run dry."""
        try:
            if self._profile is None:
                self._profile = self._hooked_or_not(lambda: self._dry.run(OffloadPlan(self.step.samples)))
        except Exception as error:  # whatever the user's code says to tensors without values
            self._add_note(f"{error}: predicted from real runs of a few samples")
            return None
        if self._check and not self._dry_is_real(in_place=not self._profile.trace.writes_parameters):
            self._add_note("a real run saves other storages than a dry one: predicted from real runs of a few samples")
            return None
        return self._profile

    def _dry_is_real(self, in_place: bool) -> bool:
        few = self.sub_batches[0] if len(self.sub_batches) > 1 else min(_FEW, self.step.samples)
        small = replace(self.step.of_size(few), optimizers=())
        dry, real = (
            DryRun(small, real=real, host=self._host, in_place=in_place).run(OffloadPlan(small.samples))
            for real in (False, True)
        )
        return [one.nbytes for one in dry.saved] == [one.nbytes for one in real.saved]

    @property
    def not_run(self) -> list[str]:
        """Classes of optimizers whose states are not known, because they could not be run by themselves."""
        dry = self._dry.not_run if self.plain is not None else []
        return list(dict.fromkeys([*dry, *self._not_run_really]))

    def lifetimes(self, sub_batch: int) -> Lifetimes:
        """Lives of storages for the whole batch at once, or for parts of it."""
        if sub_batch == self.step.samples:
            return self._whole
        smallest, lives = self._parts
        return lives if lives is not None and sub_batch >= smallest else self._alone(sub_batch)

    def plan(self, sub_batch: int, *, all_of: bool = False) -> OffloadPlan:
        """Nothing, or everything, offloaded."""
        saved = len(self.lifetimes(sub_batch).passes[0])
        return OffloadPlan(sub_batch, frozenset(range(saved)) if all_of else frozenset(), 0, saved)

    def peak_bytes(self, plan: OffloadPlan, in_flight_bytes: int = 0, operations: Operations | None = None) -> int:
        """Peak of what tensors and operations hold under a plan, put together from the dry runs.

        Args:
            operations: what these allocate for themselves; by default as in :attr:`costs`.
        """
        operations = self.costs.operations if operations is None else operations
        lives, count = self.lifetimes(plan.sub_batch), -(-self.step.samples // plan.sub_batch)
        size, larger = divmod(self.step.samples, count)  # parts are as large, and some of them one larger
        second = size + (larger > 1) if count > 1 and size + (larger > 0) == plan.sub_batch else None
        return max(self.update_bytes, lives.peak_bytes(plan, in_flight_bytes, operations, second))

    def exact_bytes(
        self, plan: OffloadPlan, in_flight_bytes: int = 0, operations: Operations | None = None
    ) -> tuple[int, int]:
        """The same by a dry run under this very plan, or put together where there is none; and of tensors alone.

        The second number is 0 where nothing can be run dry.
        """
        if self.plain is None:
            return self.peak_bytes(plan, in_flight_bytes, operations), 0
        run = self.exact_run(plan, in_flight_bytes)
        peak = run.peak_with(self.costs.operations if operations is None else operations)
        return max(self.update_bytes, peak), max(self.update_bytes, run.peak_bytes)

    def small_bytes(self, plan: OffloadPlan, in_flight_bytes: int = 0) -> int:
        """Return by how much the peak is lower without tensors that a pool leaves to the C library; 0 where unknown."""
        if self.plain is None:
            return 0
        whole = plan.sub_batch >= self.step.samples and not plan.offload
        run = self.plain if whole else self.exact_run(plan, in_flight_bytes)
        peaks = (run.peak_with(self.costs.operations, smallest) for smallest in (1, POOLED_BYTES))
        total, large = (max(self.update_bytes, peak) for peak in peaks)
        return total - large

    def require(self, budget_bytes: int, fewer: str | None = None) -> None:
        """Refuse a budget below the floor, which need not be found out for one that the plain step fits into.

        Args:
            fewer: see :meth:`MemoryFloor.refusal`.

        Raises:
            BudgetError: it is.
        """
        if budget_bytes < self._roof_bytes and budget_bytes < self.floor.bytes:
            raise self.floor.refusal(budget_bytes, fewer)

    @property
    def floor(self) -> MemoryFloor:
        """Everything offloaded, the smallest sub-batch, nothing fetched ahead; never more than the plain step needs."""
        if self._floor is None:
            smallest, least = self.sub_batches[0], self._floor_costs
            plans = [self.plan(smallest, all_of=True), self.plan(smallest)]
            plan = min(plans, key=lambda one: self.peak_bytes(one, 0, least.operations))
            needed, _ = self.exact_bytes(plan, 0, least.operations)
            if self._plain_peak_bytes < needed:
                plan, needed = self.plan(self.step.samples), self._plain_peak_bytes
            offloaded_run = self.offloaded(smallest)
            nbytes = min(needed + least.scratch(smallest), self._roof_bytes)
            self._floor = MemoryFloor(
                nbytes,
                plan.sub_batch,
                offloaded_run.resident_bytes,
                max(0, nbytes - needed),
                _largest_task(offloaded_run, least.operations),
                no_offload=self.no_offload,
                plan=plan,
            )
        return self._floor

    @property
    def _plain_peak_bytes(self) -> int:
        if self.plain is None or self.step.samples not in self.sub_batches:
            return _NEVER
        return self.plain.peak_with(self._floor_costs.operations)

    @property
    def _roof_bytes(self) -> int:
        """No budget of so much is refused."""
        return min(self._plain_peak_bytes + self._floor_costs.spare_bytes, self._most_bytes)

    def exact_run(self, plan: OffloadPlan, in_flight_bytes: int = 0) -> StepProfile:
        """A dry run under this very plan, without the update, for steps that can be run dry; the last one is kept."""
        if self._exact is None or self._exact[:2] != (plan, in_flight_bytes):
            run = self._dry.run(plan, in_flight_bytes=in_flight_bytes, update=False, as_cut=True)
            self._exact = plan, in_flight_bytes, run
        return self._exact[2]

    @property
    def _dry(self) -> DryRun:
        if self._dry_run is None:
            self._dry_run = DryRun(self.step, host=self._host)
        return self._dry_run

    @cached_property
    def update_bytes(self) -> int:
        """Most bytes that are held during the optimizers' updates."""
        if self.plain is not None:
            return self.plain.trace.update_peak_bytes
        few = self.step.of_size(fewest_samples(self.step))
        batch_bytes = sum(sizes_of(few.batch))
        small = DryRun(few, real=True, host=self._host).run(OffloadPlan(few.samples)).trace.update_peak_bytes
        return small - batch_bytes + self._batch_bytes if small else 0

    @cached_property
    def _whole(self) -> Lifetimes:
        samples = self.step.samples
        if self.plain is not None:
            try:
                return Lifetimes(self.plain, self.offloaded(samples))
            except ScheduleError:  # the first pass ever did more: it made a mask, say, that the model keeps
                return Lifetimes(self._part(samples), self.offloaded(samples))
        # With very few samples a step may run other operations than with more.
        for low in (1, 2, 4)[fewest_samples(self.step) - 1 :]:
            small, large = (self._real(size, size) for size in (min(low, samples), min(2 * low, samples)))
            with suppress(ScheduleError):
                return Lifetimes(*small, large[0], batch_bytes=self._batch_bytes)
        return Lifetimes(*self._real(samples, samples))

    @cached_property
    def _parts(self) -> tuple[int, Lifetimes | None]:
        """Lives for sub-batches from a size on: with one sample, say, a step may run other operations than with two."""
        # Of an odd batch's two halves the second has one sample less, so sizes do not follow from it.
        sizes = [size for size in self.sub_batches if size <= self.step.samples // 2]
        for low in sizes[:-1]:
            try:
                return low, self._between(low, sizes[-1])
            except ScheduleError:
                continue
        return self.step.samples, None

    def _between(self, low: int, high: int) -> Lifetimes:
        if self.plain is not None:
            return Lifetimes(self._part(low), self.offloaded(low), self._part(high))
        small, large = self._real(low, 2 * low), self._real(2 * low, min(4 * low, self.step.samples))
        return Lifetimes(*small, large[0], batch_bytes=self._batch_bytes)

    @_once
    def _alone(self, sub_batch: int) -> Lifetimes:
        if self.plain is not None:
            return Lifetimes(self._part(sub_batch), self.offloaded(sub_batch))
        return Lifetimes(*self._real(sub_batch, 2 * sub_batch), batch_bytes=self._batch_bytes)

    @_once
    def _part(self, sub_batch: int) -> StepProfile:
        return self._dry.run(OffloadPlan(sub_batch), update=False)

    @_once
    def offloaded(self, sub_batch: int) -> StepProfile:
        """A run with everything offloaded."""
        if self.plain is not None:
            return self._dry.run(everything(sub_batch), compare=False, update=False)
        return self._real(sub_batch, min(2 * sub_batch, self.step.samples))[1]

    @_once
    def _real(self, sub_batch: int, samples: int) -> tuple[StepProfile, StepProfile]:
        """Plain, and with everything offloaded, on copies of the model and the first ``samples``."""

        def both() -> tuple[StepProfile, StepProfile]:
            run = DryRun(self.step.of_size(samples), real=True, host=self._host)
            self._not_run_really += run.not_run
            plain = run.run(OffloadPlan(sub_batch), update=False)
            return plain, run.run(everything(sub_batch), compare=False, update=False)

        return self._hooked_or_not(both)

    def _hooked_or_not(self, run: Callable[[], _Result]) -> _Result:
        """Result of a run; of one without hooks, from now on, where the step refuses them."""
        try:
            return run()
        except NoHooksError as error:
            self.no_offload, self._host = str(error), HostNone()
            self._add_note(self.no_offload)
            self._dry_run = None  # made anew, without
            return run()

    def _add_note(self, text: str) -> None:
        self.note = "; ".join(filter(None, (self.note, text)))

    @property
    def _batch_bytes(self) -> int:
        tensors = tensors_in(self.step.batch)
        storages = [tensor.untyped_storage() for tensor in tensors if has_storage(tensor)]
        others = [tensor for tensor in tensors if not has_storage(tensor)]
        return sum({storage_address(storage): storage.nbytes() for storage in storages}.values()) + sum(
            sizes_of(others)
        )


def _largest_task(profile: StepProfile, operations: Operations) -> LargestTask:
    """Find it with what operations allocate for themselves: that may make another one the largest."""
    if not operations:
        return profile.largest_task
    own = {kind: size.at(profile.plan.sub_batch) for kind, size in operations.items()}
    extra = [own.get(one.kind, 0) for one in profile.trace.operations]
    needs = [nbytes + more for nbytes, more in zip(profile.held_bytes(), extra, strict=True)]
    at = max(range(len(needs)), key=needs.__getitem__, default=-1)
    if at < 0 or needs[at] <= profile.peak_bytes:
        return profile.largest_task
    largest = replace(profile, trace=replace(profile.trace, peak_at=at)).largest_task
    return replace(largest, nbytes=largest.nbytes + extra[at])
