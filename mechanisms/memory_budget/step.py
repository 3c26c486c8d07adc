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
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.arguments import checked_with
from retime.foundations.messages import parse_bytes, warn_difference
from retime.foundations.parts import loss_of
from retime.foundations.preserve_state import CompiledCode
from retime.mechanisms.memory_budget.dry_run import Gradients, TooMuchAllocated, check_held
from retime.mechanisms.memory_budget.offload import HostTier, check_host
from retime.mechanisms.memory_budget.plan_files import OtherPlansError, write_plans
from retime.mechanisms.memory_budget.planner import BudgetOptions, Step, StepPlanner
from retime.mechanisms.memory_budget.plans import BatchPlans, BatchRecord, Offloads
from retime.mechanisms.memory_budget.report import AnotherPath, BudgetReport, PlannedShape, warn_of_dropped
from retime.mechanisms.memory_budget.sub_batches import PlannedBatches, SubBatches
from retime.schedules.errors import ScheduleError

# In what way a batch runs, and the error where there is none.


class ExecutionMode(IntEnum):
    """Way to run a batch: as without a budget, at once but with storages offloaded, or in sub-batches."""

    PLAIN = 0
    WHOLE = 1
    PARTS = 2


class NoLossError(ValueError):
    """A step gave no loss for this batch, so there is nothing to plan from or to go backward from."""


class BudgetedStep:
    """Runs the steps of one model inside a budget.

    With offload-only plans results equal the plain step's bit for bit, with sub-batches up to rounding; a probe on the
    first batch decides whether sub-batches may be used (:func:`certify`).

    Args:
        model: all that a step trains.
        optimizers: those that update it; their states count.
        budget_bytes: for parameters, buffers, gradients, optimizer states, the batch, activations and workspaces of
            operations. On a CPU: by how much the process may grow over its size without the model.
        host: where offloaded storages go; it is closed by :meth:`remove`.
        options: the following ones in one object; those that are given by name take the place of its.
        batchnorm: for layers with batch statistics: ``"offload"`` only, or ``"ghost"`` statistics of each sub-batch.
        split: a ``split_batch(batch, sub_batch)`` hook for batches that cannot be cut along their first dimension.
        loss_weight: counts what the loss of a part is a mean over, if a probe cannot see it.
        on_shape_change: ``"replan"`` for batches of another shape, or ``"error"``. Smaller batches of the same shape
            else keep their plan.
        sub_batches: False plans for whole batches only.
        dry_run: ``"auto"`` calls the step more often than training does, unless the budget is many times what a step
            needs, and says so before; ``"off"`` never does: the first step of each shape runs with everything
            offloaded, and plans follow from what it saved. Batches then stay whole.
        gradients, buckets, reduction_bytes: what else holds memory, and when; see :class:`TrainingStep`.
        hidden_bytes: of tensors that nothing in Python holds; plans count them, and freed memory leaves room for them.
        may_stop: a first step that runs without a plan may be stopped in its forward pass, and runs again.
        whole_because: why batches must not be split, if the caller knows a reason; errors quote it.
        plan: a file that :meth:`save_plan` or ``retime plan --save`` wrote: its plans are used, and no others.
        say: called with each line of progress.
        make_plan: a ``make_plan(planner, step, batch, samples)`` that makes the plan of each new shape, instead of
            :meth:`StepPlanner.make`. First steps then are planned for too, and none is stopped.

    Raises:
        TypeError: ``host`` is no host tier, or a number of bytes is no number.
        ValueError: an unknown choice, or a number of bytes that cannot be read.
        PlanFileError, OSError: ``plan`` cannot be used.
    """

    @checked_with(BudgetOptions)
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        budget_bytes: int | str,
        host: HostTier,
        options: BudgetOptions | None = None,
        **named: Any,
    ) -> None:
        check_host(host)
        budget_bytes = parse_bytes("budget_bytes", budget_bytes)
        self.model, self.optimizers, self.budget_bytes, self.host = model, list(optimizers), budget_bytes, host
        self._options = options = replace(options or BudgetOptions(), **named)
        self._offloads, self._report, compiled = Offloads(host), BudgetReport(budget_bytes), CompiledCode()
        self._planner = StepPlanner(model, self.optimizers, budget_bytes, host, options)
        self._plans = BatchPlans(self._planner, self._offloads, self._report, compiled)
        self._batches = PlannedBatches(self._plans, self._offloads, compiled, self._report)

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
        with suppress(TooMuchAllocated, AnotherPath):
            return self._prepared(step, batch).forward(0)
        # Behind an `except`, not in it: its traceback would hold the stopped pass's activations while this one runs.
        return self._prepared(step, batch).forward(0)

    def choose(self, step: Step, batch: Any) -> ExecutionMode:
        """Plan if need be; :attr:`parts` are ready unless the batch is to run plainly."""
        self.drop()
        record = self._record(batch)
        shape = self._plans.first_or_plan(step, record)
        if shape.plain and self._plans.book.find(record) is not None:
            return ExecutionMode.PLAIN
        return ExecutionMode.PARTS if len(self._batches.prepare(step, record)) > 1 else ExecutionMode.WHOLE

    def prepare(self, step: Step, batch: Any) -> SubBatches:
        """Plan if need be, and cut the batch; nothing of it runs yet."""
        return self._batches.prepare(step, self._record(batch))

    def _prepared(self, step: Step, batch: Any) -> SubBatches:
        return self.prepare(step, batch)

    def finish(self, loss: Tensor, backward: Callable[[Tensor], Any] | None = None) -> Any:
        """Backward pass of the first sub-batch from ``loss``, then all others; returns as :meth:`run`."""
        now = self._batches.drop()
        if now is None:
            raise RuntimeError("finish() without begin(): no batch is under way")
        backward = backward or (lambda whole: whole.backward())  # type: ignore[no-untyped-call]
        try:
            first = now.weighted(0, loss)
            del loss  # else its graph would live on through the other parts, even if it has no weight
            with self._batches.backward():
                if first is not None:
                    backward(first)
                del first
                return now.run(backward, start=1)
        finally:
            self.ended()

    def ended(self) -> None:
        """A batch is over, or has failed."""

    @property
    def parts(self) -> SubBatches | None:
        """The sub-batches of the batch that is under way."""
        return self._batches.now

    def drop(self) -> SubBatches | None:
        """Forget the batch that is under way: there is no loss to go backward from."""
        return self._batches.drop()

    def count_plain(self) -> None:
        """A batch whose plan asks for nothing was run by the caller itself."""
        self._batches.count(1)

    @contextmanager
    def offloading(self, step: Step, batch: Any) -> Iterator[None]:
        """Around a forward pass of the caller's own, with ``sub_batches=False``; ``step`` is used for planning only.

        Raises:
            BudgetError, ScheduleError: see :meth:`run`.
            ValueError: this object plans sub-batches, which need :meth:`run`.
        """
        if self._options.sub_batches:
            raise ValueError(
                "offloading() runs batches whole: make the BudgetedStep with sub_batches=False, or use run()"
            )
        with self._batches.around_whole(step, self._record(batch)):
            yield

    def plan(self, step: Step, batch: Any) -> PlannedShape:
        """Plan for batches like this one; made now if there is none yet.

        Raises:
            BudgetError, ScheduleError: see :meth:`run`.
        """
        return self._plans.plan(step, self._record(batch))

    def planned(self, batch: Any) -> PlannedShape | None:
        """Plan that was made for batches like this one; None if there was none yet."""
        return self._plans.book.find(self._record(batch))

    @property
    def planning(self) -> bool:
        """Return whether the step that runs at the moment is only tried out: nothing of it is to be kept."""
        return self._planner.planning

    def expect_gradients(self, choice: Gradients) -> None:
        """Expect earlier steps' gradients from the next batch on, or none; plans for the other choice are kept beside.

        Raises:
            ValueError: an unknown choice.
        """
        if choice != self._planner.gradients:
            check_held(choice, self._options.buckets)
            self._planner.gradients = choice

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of tensors that nothing in Python holds, as far as freed memory leaves room for them."""
        return self._plans.memory.hidden_bytes

    def report(self) -> BudgetReport:
        """Report of what was planned and done so far."""
        self._report.offload = self._offloads.report()
        self._report.grown_bytes = self._plans.memory.grown_bytes()
        self._plans.measure_first()
        return self._report

    def state_dict(self) -> dict[str, Any]:
        """Plans by shape (of several ones the one used last), and what they were made for, in plain types."""
        return self._plans.book.state(self._planner.made_for())

    def load_state_dict(self, state: Any) -> None:
        """Take up plans of an earlier run, if they were made for the same budget, choices, model and optimizers.

        What is no such state is dropped with a :class:`NoEffectWarning`, and planned anew.
        """
        try:
            self._plans.book.load(state, self._planner.made_for())
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
        if self._plans.book.unexamined():
            warn_difference(
                "the last batch of its shape computed something else than the planned batch, and it is not known "
                "whether its sub-batches gave its gradient: train on, which examines it, or compare with a run without "
                "a budget",
                every_rank=True,
            )
        self._batches.drop()
        self._offloads.forget_all()
        self._plans.memory.freed.close()
        self.host.close()

    def _record(self, batch: Any) -> BatchRecord:
        options = self._options
        return BatchRecord(batch, self.model, self._planner.gradients, options.split, whole=not options.sub_batches)
