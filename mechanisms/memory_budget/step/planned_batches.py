"""Runs batches under the plans that were decided: cuts them, and goes forward with storages offloaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from retime.foundations.parts import Certificate, NotSeparableError, Split, WeightsUnclearError, loss_of
from retime.foundations.preserve_state import CompiledCode, random_state, set_random_state
from retime.foundations.storages import tensors_in
from retime.mechanisms.memory_budget.dry_run import EVERYTHING, TooMuchAllocated
from retime.mechanisms.memory_budget.offload import PlanMismatch
from retime.mechanisms.memory_budget.planning import BudgetReport, PlanChoice, PlannedShape, Step
from retime.mechanisms.memory_budget.step.batch_plans import BatchPlans
from retime.mechanisms.memory_budget.step.batch_record import BatchRecord
from retime.mechanisms.memory_budget.step.graph_paths import AnotherPath, GraphPaths
from retime.mechanisms.memory_budget.step.offloads import Offloads
from retime.mechanisms.memory_budget.step.sub_batches import SubBatches
from retime.schedules.budget import OffloadPlan

__all__ = ["PlannedBatches"]


class PlannedBatches:
    """The batch that is under way.

    Args:
        plans: decides under which plan a batch runs, and is told what it showed.
        offloads, compiled, report: of the same step.
        split: cuts batches.
        may_stop: a sub-batch may be stopped in its forward pass, and run again.

    Attributes:
        now: its sub-batches; None if there is no such batch.
        stopped: it was stopped in its forward pass, and has not begun again.
    """

    def __init__(
        self,
        plans: BatchPlans,
        offloads: Offloads,
        compiled: CompiledCode,
        report: BudgetReport,
        *,
        split: Split,
        may_stop: bool,
    ) -> None:
        self.now: SubBatches | None = None
        self.stopped = False
        self._now_plain = True
        self._plans, self._offloads, self._compiled, self._report = plans, offloads, compiled, report
        self._split, self._may_stop = split, may_stop

    def prepare(self, step: Step, record: BatchRecord) -> SubBatches:
        """Plan if need be, and cut the batch; nothing of it runs yet."""
        self.stopped = False
        shape = self._plans.first_or_plan(step, record)
        planner, book = self._plans.planner, self._plans.book
        sub_batch = min(shape.choice.plan.sub_batch, record.samples)
        paths = book.paths(record)
        paths.begin()
        self._forget_others(shape)
        self._now_plain = shape.plain
        first = book.find(record) is None
        around = partial(self._finding_out, record, shape) if first else nullcontext

        def forward(part: Any) -> Any:
            with around():
                return self._forward(step, part, shape, paths)

        def certify_again(whole: Any, known: Certificate) -> Certificate:
            with self._plans.room(record.batch):
                return planner.certify(step, whole, among=known)

        def compare(whole: Any, known: Certificate, sizes: Collection[int]) -> Certificate:
            with self._plans.room(record.batch):
                return planner.compared(step, whole, known, sizes)

        try:
            now = SubBatches(
                planner.model,
                forward,
                record.batch,
                max(1, sub_batch),
                shape.certificate or Certificate(None, "this batch is not to be split"),
                split=self._split,
                certify_again=certify_again,
                compare=compare,
                ghost=planner.batchnorm == "ghost",
            )
        except (NotSeparableError, WeightsUnclearError) as error:  # this batch told what those before did not
            self._plans.keep_whole(step, record, str(error))
            return self.prepare(step, record)
        self.now = now
        if len(now) > 1 and now.certificate is not shape.certificate:  # this batch told more
            book.recertify(record, now.certificate)
        self.count(len(now))
        return now

    def prepare_whole(self, step: Step, record: BatchRecord) -> SubBatches:
        """The batch at once and without any plan, whatever memory that takes; nothing of it runs yet."""
        self.stopped, self._now_plain = False, True
        whole = Certificate(None, "this batch is not to be split")
        self.now = SubBatches(self._plans.planner.model, step, record.batch, record.samples, whole, split=self._split)
        self.count(1)
        return self.now

    @contextmanager
    def around_whole(self, step: Step, record: BatchRecord) -> Iterator[None]:
        """Around a forward pass of the caller's own on the whole batch."""
        shape = self._plans.first_or_plan(step, record, may_stop=False)
        self.count(1)
        self._forget_others(shape)
        first = self._finding_out(record, shape) if self._plans.book.find(record) is None else nullcontext()
        with first, self._hooks(record.batch, shape.choice), self._compiled.under(shape.plain):
            yield

    def backward(self) -> AbstractContextManager[None]:
        """Around the backward pass of a batch, and the forward passes of its other sub-batches."""
        return self._compiled.under(self._now_plain)

    def drop(self) -> SubBatches | None:
        """Forget the batch that is under way, and return its sub-batches."""
        now, self.now = self.now, None
        return now

    def count(self, parts: int) -> None:
        """A batch runs in so many sub-batches."""
        self._report.steps += 1
        self._report.sub_batches += parts

    def _uncount(self, parts: SubBatches | None) -> None:
        self._report.steps -= 1
        self._report.sub_batches -= 1 if parts is None else len(parts)

    def _forget_others(self, shape: PlannedShape) -> None:
        """Offloads of plans that are used no more go."""
        self._offloads.keep_only({known.choice.plan for known in (*self._plans.book.shapes(), shape)})

    def _forward(self, step: Step, part: Any, shape: PlannedShape, paths: GraphPaths) -> Any:
        with self._hooks(part, shape.choice), self._compiled.under(shape.plain):
            if shape.certificate is None:
                return step(part)
            random = random_state() if self._may_stop else None
            with paths.watched() as seen:
                output = step(part)
                seen.loss = loss_of(output)
            if paths.new_at_once and random is not None and self.now is not None and len(self.now) > 1:
                del output, seen  # there is to be room for what is done next
                set_random_state(random)
                self._uncount(self.drop())
                paths.stopped = self.stopped = True
                raise AnotherPath
            return output

    @contextmanager
    def _finding_out(self, record: BatchRecord, shape: PlannedShape) -> Iterator[None]:
        """Around the forward pass of a batch that is trained to find out what its shape needs.

        Raises:
            TooMuchAllocated: it has to be planned for; nothing has happened.
        """
        plans = self._plans
        plans.memory.begin_first_step(record.batch)
        try:
            with plans.first.counted(record.key, record.batch, shape.samples) as found:
                yield
        except TooMuchAllocated:
            self._uncount(self.drop())
            raise
        for known in found:
            plans.keep(record, known)
        if not found:
            plans.first.note(record.key, shape.samples, self._offloads.sizes(shape.choice.plan))

    @contextmanager
    def _hooks(self, part: Any, choice: PlanChoice) -> Iterator[None]:
        if not choice.plan.offload:
            yield
            return
        model = self._plans.planner.model
        keep = [*model.parameters(), *model.buffers(), *tensors_in(part)]
        with self._offloads.around(choice, keep, partial(self._mismatch, choice.plan)):
            yield

    def _mismatch(self, plan: OffloadPlan, mismatch: PlanMismatch) -> None:
        if plan.offload != EVERYTHING:  # else of a first step, which finds out what is saved
            self._plans.drop_mismatched(plan, mismatch)
