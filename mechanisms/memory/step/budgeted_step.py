"""Training steps that stay inside a byte budget: profile, plan and execution put together (moDNN, section 4.2).

    step = BudgetedStep(model, [optimizer], 8 * 2**30, host=parse_host("memory", "cuda"))
    for batch in loader:
        optimizer.zero_grad()
        output = step.run(lambda part: {"loss": criterion(model(part[0]), part[1])}, batch)   # forward and backward
        optimizer.step()
    print(step.report()); step.remove()

The first batch of each shape is planned for: nothing if it fits, else nearly the fastest of all (sub-batch size,
offloaded storages, prefetch distance) that fit: the one that moves the fewest bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retime.mechanisms.arguments import checked
from retime.mechanisms.byte_sizes import parse_bytes, show_bytes
from retime.mechanisms.memory.batches import (
    BatchNormChoice,
    Certificate,
    NotSeparableError,
    Split,
    WeightsUnclearError,
    check_choice,
    loss_of,
    split_batch,
)
from retime.mechanisms.memory.dry_run import EVERYTHING, Buckets, Gradients, TooMuchMade, check_held, everything
from retime.mechanisms.memory.host import HostTier, check_host
from retime.mechanisms.memory.offload import PlanMismatch
from retime.mechanisms.memory.planning import (
    BudgetReport,
    GivenPlans,
    OtherPlansError,
    PlanChoice,
    PlannedShape,
    Step,
    StepPlanner,
    TimeLimit,
    write_plans,
)
from retime.mechanisms.memory.sandbox import CompiledCode, random_state, set_random_state
from retime.mechanisms.memory.step.batch_record import BatchRecord
from retime.mechanisms.memory.step.first_steps import FirstSteps, check_dry_run
from retime.mechanisms.memory.step.graph_paths import AnotherPath, GraphPaths
from retime.mechanisms.memory.step.held_memory import HeldMemory
from retime.mechanisms.memory.step.offloads import Offloads
from retime.mechanisms.memory.step.plan_book import MOST_PLANS, PlanBook
from retime.mechanisms.memory.step.shape_changes import (
    check_on_shape_change,
    warn_of_dropped,
    warn_of_mismatches,
    warn_of_paths,
    warn_of_unexamined,
    warn_of_whole,
    why_anew,
)
from retime.mechanisms.memory.step.sub_batches import SubBatches
from retime.mechanisms.memory.step.way import Way
from retime.mechanisms.storages import tensors_in
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError


class BudgetedStep:
    """Runs the steps of one model inside a budget.

    Offload-only plans give the plain step's numbers bit by bit, sub-batches give them up to rounding; whether
    sub-batches may be used is found out by a probe on the first batch (:func:`certify`).

    Args:
        model: all that a step trains.
        optimizers: those that update it; their states count.
        budget_bytes: for parameters, buffers, gradients, optimizer states, the batch, activations and what operations
            need for themselves. On a CPU: what the process may grow by over itself without the model.
        host: where offloaded storages go; it is closed by :meth:`remove`.
        batchnorm: what to do about layers with batch statistics: ``"offload"`` only, or ``"ghost"`` statistics of
            each sub-batch.
        split: a ``split_batch(batch, sub_batch)`` hook for batches that cannot be cut by their first dimension.
        loss_weight: counts what the loss of a part is a mean over, where a probe cannot see it.
        on_shape_change: ``"replan"`` for batches of another shape, or ``"error"``. Smaller batches of the same shape
            else keep their plan.
        sub_batches: False plans for whole batches only.
        dry_run: ``"auto"`` calls the step more often than training does where a budget is not roomy, which is said
            before; ``"off"`` never does: the first step of each shape runs with everything offloaded, and plans follow
            from what it saved. Batches then stay whole.
        gradients, buckets, reduction_bytes: what else holds memory, and when; see :class:`TrainingStep`.
        hidden_bytes: of tensors that nothing in Python holds; plans count them, and freed memory leaves room for them.
        may_stop: a first step that runs without a plan may be stopped in its forward pass, and runs again.
        whole_because: why batches must not be split, if the caller knows a reason; refusals quote it.
        plan: a file that :meth:`save_plan` or ``retime plan --save`` wrote: its plans are used, and no others.
        say: is told what is being done, a line at a time.
        limit: when planning is to end: with the best plan known by then, or with
            :class:`~retime.mechanisms.memory.planning.time_limit.OutOfTime`.

    Attributes:
        planning: the step that runs at the moment is only tried out: nothing of it is to be kept.
        gradients: whether those of steps before are there; plans for other choices than the present one are kept.
        may_stop: as given.

    Raises:
        TypeError: ``host`` is no host tier, or a number of bytes is no number.
        ValueError: an unknown choice, or a number of bytes that cannot be read.
        PlanFileError, OSError: ``plan`` cannot be used.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        budget_bytes: int | str,
        host: HostTier,
        *,
        batchnorm: str = "offload",
        split: Split = split_batch,
        loss_weight: Callable[[Any], Any] | None = None,
        on_shape_change: str = "replan",
        gradients: Gradients = "freed",
        buckets: Buckets = "",
        reduction_bytes: int | str = 0,
        hidden_bytes: int = 0,
        may_stop: bool = True,
        whole_because: str = "",
        sub_batches: bool = True,
        dry_run: str = "auto",
        plan: str | os.PathLike[str] | None = None,
        say: Callable[[str], None] = lambda text: None,
        limit: TimeLimit | None = None,
    ) -> None:
        self.batchnorm: BatchNormChoice = check_choice(batchnorm)
        check_on_shape_change(on_shape_change)
        check_held(gradients, buckets)
        check_host(host)
        budget_bytes = parse_bytes("budget_bytes", budget_bytes)
        reduction_bytes = parse_bytes("reduction_bytes", reduction_bytes, least=0)
        self.model, self.optimizers, self.budget_bytes, self.host = model, list(optimizers), budget_bytes, host
        self._split, self._on_shape_change, self._say = split, on_shape_change, say
        self._planner = StepPlanner(
            model,
            self.optimizers,
            budget_bytes,
            host,
            batchnorm=self.batchnorm,
            split=split,
            loss_weight=loss_weight,
            gradients=gradients,
            buckets=buckets,
            reduction_bytes=reduction_bytes,
            sub_batches=sub_batches,
            say=say,
            trying_out=self._trying_out,
            limit=limit,
        )
        self._first = FirstSteps(model, self.optimizers, budget_bytes, check_dry_run(dry_run), say)
        self._planner.whole_because = whole_because
        self._plans = PlanBook()
        self._offloads = Offloads(host)
        self._report = BudgetReport(budget_bytes)
        self._now: SubBatches | None = None
        self._now_plain = True
        self._compiled = CompiledCode()
        self._given = None if plan is None else GivenPlans(plan, self._planner)
        self._memory = HeldMemory(model, self.optimizers, hidden_bytes)
        self.planning = False
        self.may_stop = may_stop

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, step: Step, batch: Any, backward: Callable[[Tensor], Any] | None = None) -> Any:
        """Forward and backward pass of a batch; returns what the step would have returned for all of it, detached.

        ``torch.compile`` what the step calls, not what calls this: it leaves out ``run`` and all that it calls.

        Args:
            step: computes on a batch and returns the loss, or a mapping or object with ``loss``.
            batch: on the model's device.
            backward: what to do with a loss; ``loss.backward()`` as default.

        Raises:
            BudgetError: the budget is below the floor; before the first step.
            ScheduleError: a batch of another shape, with ``on_shape_change="error"``.
        """
        try:
            return self.finish(loss_of(self.begin(step, batch)), backward)
        finally:
            self.ended()

    def begin(self, step: Step, batch: Any) -> Any:
        """Plan if need be, and run the forward pass of the first sub-batch; returns what the step returns for it."""
        try:
            return self.prepare(step, batch).forward(0)
        except (TooMuchMade, AnotherPath):
            return self.prepare(step, batch).forward(0)

    def choose(self, step: Step, batch: Any) -> Way:
        """Plan if need be; :attr:`parts` are ready unless the batch is to run plainly."""
        self.drop()
        record = self._record(batch)
        shape = self._first_or_plan(step, record)
        if shape.plain and self._plans.find(record) is not None:
            return Way.PLAIN
        return Way.PARTS if len(self._prepare(step, record)) > 1 else Way.WHOLE

    def prepare(self, step: Step, batch: Any) -> SubBatches:
        """Plan if need be, and cut the batch; nothing of it runs yet."""
        return self._prepare(step, self._record(batch))

    def _prepare(self, step: Step, record: BatchRecord) -> SubBatches:
        shape = self._first_or_plan(step, record)
        sub_batch = min(shape.choice.plan.sub_batch, record.samples)
        paths = self._plans.paths(record)
        paths.begin()
        self._offloads.keep_only({known.choice.plan for known in (*self._plans.shapes(), shape)})
        self._now_plain = shape.plain
        first = self._plans.find(record) is None
        around = partial(self._finding_out, record, shape) if first else nullcontext

        def forward(part: Any) -> Any:
            with around():
                return self._forward(step, part, shape, paths)

        try:
            self._now = SubBatches(
                self.model,
                forward,
                record.batch,
                max(1, sub_batch),
                shape.certificate or Certificate(None, "this batch is not to be split"),
                split=self._split,
                certify_again=lambda whole, known: self._planner.certify(step, whole, among=known),
                ghost=self.batchnorm == "ghost",
            )
        except (NotSeparableError, WeightsUnclearError) as error:  # this batch told what those before did not
            self._keep_whole(step, record, str(error))
            return self._prepare(step, record)
        if len(self._now) > 1 and self._now.certificate is not shape.certificate:  # this batch told more
            self._plans.recertify(record, self._now.certificate)
        self._report.steps += 1
        self._report.sub_batches += len(self._now)
        return self._now

    @contextmanager
    def offloading(self, step: Step, batch: Any) -> Iterator[None]:
        """Around a forward pass of the caller's own, with ``sub_batches=False``; ``step`` is used for planning only.

        Raises:
            BudgetError, ScheduleError: see :meth:`run`.
            ValueError: this object plans sub-batches, which need :meth:`run`.
        """
        if self._planner.sub_batches:
            raise ValueError(
                "offloading() runs batches whole: make the BudgetedStep with sub_batches=False, or use run()"
            )
        record = self._record(batch)
        shape = self._first_or_plan(step, record, may_stop=False)
        self.count_plain()
        self._offloads.keep_only({known.choice.plan for known in (*self._plans.shapes(), shape)})
        first = self._finding_out(record, shape) if self._plans.find(record) is None else nullcontext()
        with first, self._hooks(batch, shape.choice), self._compiled.under(shape.plain):
            yield

    def count_plain(self) -> None:
        """A batch whose plan asks for nothing was run by the caller itself."""
        self._report.steps += 1
        self._report.sub_batches += 1

    @property
    def gradients(self) -> Gradients:
        """Whether gradients of steps before are there; plans for other choices than the present one are kept beside."""
        return self._planner.gradients

    @gradients.setter
    def gradients(self, choice: Gradients) -> None:
        self._planner.gradients = choice

    @property
    def parts(self) -> SubBatches | None:
        """The sub-batches of the batch that is under way."""
        return self._now

    def drop(self) -> SubBatches | None:
        """Forget the batch that is under way: there is no loss to go backward from."""
        now, self._now = self._now, None
        return now

    def finish(self, loss: Tensor, backward: Callable[[Tensor], Any] | None = None) -> Any:
        """Backward pass of the first sub-batch from ``loss``, then all others; returns as :meth:`run`."""
        now = self.drop()
        if now is None:
            raise RuntimeError("finish() without begin(): no batch is under way")
        backward = backward or (lambda whole: whole.backward())  # type: ignore[no-untyped-call]
        try:
            first = now.weighted(0, loss)
            del loss  # else its graph would live on through the other parts, even if it has no weight
            with self._compiled.under(self._now_plain):
                if first is not None:
                    backward(first)
                del first
                return now.run(backward, start=1)
        finally:
            self.ended()

    def ended(self) -> None:
        """A batch is over, or has failed."""

    def plan(self, step: Step, batch: Any) -> PlannedShape:
        """What is decided for batches like this one; made now if there is nothing yet.

        Raises:
            BudgetError, ScheduleError: see :meth:`run`.
        """
        return self._plan(step, self._record(batch))

    def planned(self, batch: Any) -> PlannedShape | None:
        """What was decided for batches like this one; None if nothing was yet."""
        return self._plans.find(self._record(batch))

    def _record(self, batch: Any) -> BatchRecord:
        return BatchRecord.of(batch, self.model, self.gradients, self._split)

    def _plan(self, step: Step, record: BatchRecord) -> PlannedShape:
        known = self._plans.find(record)
        if known is not None:
            known = self._examined(step, record, known)
            if known is not None:
                self._plans.use(record)
                return known
        if self._plans and self._on_shape_change == "error":
            raise ScheduleError(why_anew(record.samples, self._plans.same_shape(record)))
        return self._plan_anew(step, record)

    def _plan_anew(self, step: Step, record: BatchRecord) -> PlannedShape:
        self._say(
            f"planning a batch of {record.samples} samples for {show_bytes(self.budget_bytes)}: dry runs, a probe and "
            "trials call the step more often than training does; dry_run='off' does without them"
        )
        self._memory.limit(record.batch, self.budget_bytes)
        with self._trying_out(), self._compiled.looked_for():
            shape = self._made_or_taken(step, record)
        if not shape.plain:
            self._compiled.warn()
        return self._keep(record, shape)

    def _keep_whole(self, step: Step, record: BatchRecord, reason: str) -> None:
        """Batches like this one are not split any more."""
        warn_of_whole(reason)
        before, self._planner.whole_because = self._planner.whole_because, reason
        try:
            self._plan_anew(step, record)
        finally:
            self._planner.whole_because = before

    def report(self) -> BudgetReport:
        """What was planned and done so far."""
        self._report.offload = self._offloads.report()
        return self._report

    def state_dict(self) -> dict[str, Any]:
        """Plans by shape, and what they were made for, in plain types."""
        return self._plans.state(self._planner.made_for())

    def load_state_dict(self, state: Any) -> None:
        """Take up plans of an earlier run, if they were made for the same budget, choices, model and optimizers.

        What is no such state is dropped with a :class:`NoEffectWarning`, and planned anew.
        """
        try:
            self._plans.load(state, self._planner.made_for())
        except OtherPlansError:
            return
        except ScheduleError as error:
            warn_of_dropped(error)

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plans of all shapes so far to a JSON file, for ``plan=`` in other runs.

        Raises:
            OSError: it cannot be written.
        """
        write_plans(path, self.state_dict())

    def remove(self) -> None:
        """Give back the host's space and take wrappers off."""
        if self._plans.unexamined():
            warn_of_unexamined()
        self._now = None
        self._offloads.forget_all()
        self._memory.freed.close()
        self.host.close()

    def _first_or_plan(self, step: Step, record: BatchRecord, may_stop: bool = True) -> PlannedShape:
        """As :meth:`plan`, or what the first step of a shape is to run under, which is trained to find out the rest."""
        known = self._plans.find(record) is not None or (self._plans and self._on_shape_change == "error")
        if known or self._given is not None:
            return self._plan(step, record)
        found = self._first.planned(record.key, lambda: self._memory.needed_bytes(record.batch))
        if found is not None:
            self._offloads.forget(everything(found.samples))
            return self._keep(record, found)
        first = self._first.begin(record.key, record.batch, record.samples, may_stop and self.may_stop)
        if first is None:
            return self._plan(step, record)
        self._memory.limit(record.batch, self.budget_bytes)
        return first

    def _keep(self, record: BatchRecord, shape: PlannedShape) -> PlannedShape:
        """From now on batches like this one run under this plan."""
        self._reserve([*self._plans.shapes(but=record), shape])
        self._plans.add(record, shape)
        self._report.note(shape, MOST_PLANS)
        self._limit_freed(record.batch)
        self._say(str(shape))
        return shape

    def _reserve(self, shapes: Sequence[PlannedShape]) -> None:
        """Have the space on the host that the plans of these need, one at a time."""
        away = [shape for shape in shapes if shape.choice.plan.offload]
        if away:
            nbytes = max(shape.choice.out_bytes // -(-shape.samples // shape.choice.plan.sub_batch) for shape in away)
            self.host.reserve(nbytes, max(len(shape.choice.plan.offload) for shape in away))

    def _made_or_taken(self, step: Step, record: BatchRecord) -> PlannedShape:
        batch, samples = record.batch, record.samples
        if self._given is not None:
            return self._given.plan(record.name, step, batch, samples, dry=self._first.dry_run != "off")
        earlier = self._plans.earlier(record)
        taken = None if earlier is None else self._planner.of_kept(earlier, step, batch, samples)
        return taken or self._make_plan(step, batch, samples)

    def _make_plan(self, step: Step, batch: Any, samples: int) -> PlannedShape:
        shape = self._planner.make(step, batch, samples)
        return replace(shape, note="; ".join(filter(None, (shape.note, self._memory.freed.note))))

    def _limit_freed(self, batch: Any) -> None:
        """What freed memory may hold together with tensors: as much as the largest plan."""
        if self._plans:
            self._memory.limit(batch, max(shape.held_bytes(self.budget_bytes) for shape in self._plans.shapes()))

    @contextmanager
    def _trying_out(self) -> Iterator[None]:
        before, self.planning = self.planning, True
        try:
            yield
        finally:
            self.planning = before

    def _forward(self, step: Step, part: Any, shape: PlannedShape, paths: GraphPaths) -> Any:
        with self._hooks(part, shape.choice), self._compiled.under(shape.plain):
            if shape.certificate is None:
                return step(part)
            random = random_state() if self.may_stop else None
            with paths.watched() as seen:
                output = step(part)
                seen.loss = loss_of(output)
            if paths.new_at_once and random is not None and self._now is not None and len(self._now) > 1:
                del output, seen  # there is to be room for what is done next
                set_random_state(random)
                self._uncount(self.drop())
                paths.stopped = True
                raise AnotherPath
            return output

    def _uncount(self, parts: SubBatches | None) -> None:
        self._report.steps -= 1
        self._report.sub_batches -= 1 if parts is None else len(parts)

    @contextmanager
    def _finding_out(self, record: BatchRecord, shape: PlannedShape) -> Iterator[None]:
        """Around the forward pass of a batch that is trained to find out what its shape needs.

        Raises:
            TooMuchMade: it has to be planned for; nothing has happened.
        """
        self._memory.freed.forget_peak()
        try:
            with self._first.counted(record.key, record.batch, shape.samples) as found:
                yield
        except TooMuchMade:
            self._uncount(self.drop())
            raise
        for known in found:
            self._keep(record, known)
        if not found:
            self._first.note(record.key, shape.samples, self._offloads.sizes(shape.choice.plan))

    @contextmanager
    def _hooks(self, part: Any, choice: PlanChoice) -> Iterator[None]:
        if not choice.plan.offload:
            yield
            return
        keep = [*self.model.parameters(), *self.model.buffers(), *tensors_in(part)]
        with self._offloads.around(choice, keep, partial(self._mismatch, choice.plan)):
            yield

    def _examined(self, step: Step, record: BatchRecord, shape: PlannedShape) -> PlannedShape | None:
        """The same, if sub-batches that took another path than those before are as separable; else None: plan anew."""
        paths = self._plans.paths(record)
        if not paths.new or shape.certificate is None or record.samples < 2:
            return shape
        self._say("the step computes something else than the one that was planned for")
        again = self._planner.certify(step, record.batch, among=shape.certificate)
        stopped = paths.accept()
        warn_of_paths(again, paths, stopped)
        return self._plans.recertify(record, again) if again.separable else None

    def _mismatch(self, plan: OffloadPlan, mismatch: PlanMismatch) -> None:
        if plan.offload == EVERYTHING:  # of a first step, which finds out what is saved
            return
        if self._on_shape_change == "error":
            raise mismatch
        reason = "a forward pass saved other storages than planned"
        times = self._report.replanned[reason] = self._report.replanned.get(reason, 0) + 1
        self._plans.drop(plan)
        self._say(f"{mismatch}; the next batch of this shape is planned anew")
        warn_of_mismatches(reason, times)
