"""Decides under which plan a batch runs: a known one, a given one, an earlier run's, or one that is made now."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from retime.foundations.byte_sizes import show_bytes
from retime.foundations.parts import part_lengths
from retime.foundations.preserve_state import CompiledCode
from retime.mechanisms.memory_budget.dry_run import everything
from retime.mechanisms.memory_budget.offload import PlanMismatch
from retime.mechanisms.memory_budget.planning import BudgetReport, GivenPlans, PlannedShape, Step, StepPlanner
from retime.mechanisms.memory_budget.step.batch_record import BatchRecord
from retime.mechanisms.memory_budget.step.first_steps import DryRuns, FirstSteps
from retime.mechanisms.memory_budget.step.memory_limit import MemoryLimit
from retime.mechanisms.memory_budget.step.offloads import Offloads
from retime.mechanisms.memory_budget.step.plan_book import MOST_PLANS, PlanBook
from retime.mechanisms.memory_budget.step.shape_changes import (
    warn_of_mismatches,
    warn_of_paths,
    warn_of_whole,
    why_anew,
)
from retime.mechanisms.memory_budget.step.tried_out import TriedOut
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError

__all__ = ["BatchPlans", "MakePlan"]

MakePlan = Callable[[StepPlanner, Step, Any, int], PlannedShape]
"""Makes the plan of a step for a batch of so many samples, as :meth:`StepPlanner.make` does."""


class BatchPlans:
    """The plans of one model's batches.

    Args:
        planner: makes them.
        offloads: what runs under them.
        report: is told of each.
        compiled: is looked for while a step is tried out.
        tried_out: entered around that.
        dry_run, on_shape_change, hidden_bytes, plan, may_stop, say, make_plan: as for
            :class:`~retime.mechanisms.memory_budget.BudgetedStep`.

    Attributes:
        planner: as given.
        book: the plans so far.
        first: first steps that run without one.
        memory: what is held beside what a step makes.
    """

    def __init__(
        self,
        planner: StepPlanner,
        offloads: Offloads,
        report: BudgetReport,
        compiled: CompiledCode,
        tried_out: TriedOut,
        *,
        dry_run: DryRuns,
        on_shape_change: str,
        hidden_bytes: int,
        plan: str | os.PathLike[str] | None,
        may_stop: bool,
        say: Callable[[str], None],
        make_plan: MakePlan,
    ) -> None:
        self.planner, self.book = planner, PlanBook()
        self.first = FirstSteps(planner.model, planner.optimizers, planner.budget_bytes, dry_run, say)
        self._first_step: tuple[BatchRecord, PlannedShape] | None = None
        self._given = None if plan is None else GivenPlans(plan, planner)
        self.memory = MemoryLimit(planner.model, planner.optimizers, hidden_bytes)
        self._offloads, self._report, self._compiled, self._tried_out = offloads, report, compiled, tried_out
        self._on_shape_change, self._may_stop, self._say, self._make_plan = on_shape_change, may_stop, say, make_plan

    def first_or_plan(self, step: Step, record: BatchRecord, may_stop: bool = True) -> PlannedShape:
        """As :meth:`plan`, or what the first step of a shape is to run under, which is trained to find out the rest."""
        self.measure_first()
        self._first_step = None
        known = self.book.find(record) is not None or (self.book and self._on_shape_change == "error")
        if known or self._given is not None:
            return self.plan(step, record)
        found = self.first.planned(record.key, lambda: self.memory.needed_bytes(record.batch))
        if found is not None:
            self._offloads.forget(everything(found.samples))
            return self.keep(record, found)
        first = self.first.begin(record.key, record.batch, record.samples, may_stop and self._may_stop)
        if first is None:
            return self.plan(step, record)
        self.memory.limit(record.batch, self.planner.budget_bytes)
        return first

    def plan(self, step: Step, record: BatchRecord) -> PlannedShape:
        """What is decided for batches like this one; made now if there is nothing yet.

        Raises:
            BudgetError: the budget is below the floor.
            ScheduleError: a batch of another shape, with ``on_shape_change="error"``.
        """
        known = self.book.find(record)
        if known is not None:
            known = self._examined(step, record, known)
            if known is not None:
                self.book.use(record)
                return known
        if self.book and self._on_shape_change == "error":
            raise ScheduleError(why_anew(record.samples, self.book.same_shape(record)))
        return self._plan_anew(step, record)

    def _examined(self, step: Step, record: BatchRecord, shape: PlannedShape) -> PlannedShape | None:
        """The same, if sub-batches that took another path than those before are as separable; else None: plan anew."""
        paths = self.book.paths(record)
        if not paths.new or shape.certificate is None or record.samples < 2:
            return shape
        self._say("the step computes something else than the one that was planned for")
        with self.room(record.batch):
            again = self.planner.certify(step, record.batch, among=shape.certificate)
        stopped = paths.accept()
        warn_of_paths(again, paths, stopped)
        return self.book.recertify(record, again) if again.separable else None

    def _plan_anew(self, step: Step, record: BatchRecord) -> PlannedShape:
        self._say(
            f"planning a batch of {record.samples} samples for {show_bytes(self.planner.budget_bytes)}; nothing of "
            "it is trained yet, and save_plan() keeps the plan for other runs. Dry runs, a probe and trials call the "
            "step more often than training does; dry_run='off' does without them"
        )
        self.memory.limit(record.batch, self.planner.budget_bytes)
        with self._tried_out(), self._compiled.looked_for():
            shape = self._with_parts_compared(step, record, self._made_or_taken(step, record))
        if not shape.plain:
            self._compiled.warn()
        self.memory.freed.trim()  # planning is over: what it took is the steps'
        return self.keep(record, shape)

    def _made_or_taken(self, step: Step, record: BatchRecord) -> PlannedShape:
        batch, samples = record.batch, record.samples
        if self._given is not None:
            return self._given.plan(record.name, step, batch, samples, dry=self.first.dry_run != "off")
        earlier = self.book.earlier(record)
        taken = None if earlier is None else self.planner.of_saved(earlier, step, batch, samples)
        if taken is not None:
            return taken
        shape = self._make_plan(self.planner, step, batch, samples)
        return replace(shape, note="; ".join(filter(None, (shape.note, self.memory.freed.note))))

    def _with_parts_compared(self, step: Step, record: BatchRecord, shape: PlannedShape) -> PlannedShape:
        """The same, once its parts are known to do what the probed samples do; else a plan for the whole batch.

        The first batch would find it out too, but has no room for a dry run.
        """
        known = shape.certificate
        if known is None or not known.samples:
            return shape
        sub_batch = min(shape.choice.plan.sub_batch, record.samples)
        sizes = {record.samples, *part_lengths(record.samples, -(-record.samples // sub_batch))} - known.sizes
        compared = self.planner.compared(step, record.batch, known, sizes) if sizes else known
        if compared.separable:
            return replace(shape, certificate=compared)
        warn_of_whole(compared.reason)
        with self._kept_whole(compared.reason):
            return self._made_or_taken(step, record)

    @contextmanager
    def room(self, batch: Any) -> Iterator[None]:
        """Around what examines a step in the midst of training: freed memory that is kept makes room for it."""
        self.memory.limit(batch, 0)
        try:
            yield
        finally:
            self.memory.freed.trim()
            self._limit_freed(batch)

    def keep(self, record: BatchRecord, shape: PlannedShape) -> PlannedShape:
        """From now on batches like this one run under this plan."""
        self._reserve([*self.book.shapes(but=record), shape])
        self.book.add(record, shape)
        self._report.note(shape, MOST_PLANS)
        self._first_step = None if shape.first_step_bytes is None else (record, shape)
        self._limit_freed(record.batch)
        self._say(str(shape))
        return shape

    def measure_first(self) -> None:
        """Note what a first step that was trained without a plan has allocated so far, until the next batch begins."""
        if self._first_step is None:
            return
        record, before = self._first_step
        shape = replace(before, first_step_bytes=self.memory.allocated_bytes())
        self._report.renew(before, shape)
        self.book.renew(record, before, shape)
        self._first_step = record, shape

    def keep_whole(self, step: Step, record: BatchRecord, reason: str) -> None:
        """Batches like this one are not split any more."""
        warn_of_whole(reason)
        with self._kept_whole(reason):
            self._plan_anew(step, record)

    @contextmanager
    def _kept_whole(self, reason: str) -> Iterator[None]:
        before, self.planner.whole_because = self.planner.whole_because, reason
        try:
            yield
        finally:
            self.planner.whole_because = before

    def drop_mismatched(self, plan: OffloadPlan, mismatch: PlanMismatch) -> None:
        """A forward pass under this plan saved something else: the next batch is planned anew.

        Raises:
            PlanMismatch: with ``on_shape_change="error"``.
        """
        if self._on_shape_change == "error":
            raise mismatch
        reason = "a forward pass saved other storages than planned"
        times = self._report.replanned[reason] = self._report.replanned.get(reason, 0) + 1
        self.book.drop(plan)
        self._say(f"{mismatch}; the next batch of this shape is planned anew")
        warn_of_mismatches(reason, times)

    def hide(self, hidden_bytes: int, batch: Any) -> None:
        """From now on nothing in Python holds so many bytes of tensors, in batches like this one."""
        self.memory.hidden_bytes = hidden_bytes
        self._limit_freed(batch)

    def _reserve(self, shapes: Sequence[PlannedShape]) -> None:
        """Have the space on the host that the plans of these need, one at a time."""
        away = [shape for shape in shapes if shape.choice.plan.offload]
        if away:
            nbytes = max(shape.choice.out_bytes // -(-shape.samples // shape.choice.plan.sub_batch) for shape in away)
            self.planner.host.reserve(nbytes, max(len(shape.choice.plan.offload) for shape in away))

    def _limit_freed(self, batch: Any) -> None:
        """What freed memory may hold together with tensors: as much as the largest plan."""
        if self.book:
            held = max(shape.reserved_bytes(self.planner.budget_bytes) for shape in self.book.shapes())
            self.memory.limit(batch, held)
