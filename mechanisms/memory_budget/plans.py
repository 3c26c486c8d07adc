"""Decides under which plan a batch runs: a known one, a given one, an earlier run's, or one that is made now."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool import FreedMemory
from retime.foundations.measure import PeakWatch
from retime.foundations.messages import show_bytes, warn_no_effect
from retime.foundations.parts import Certificate, Split, key_of, name_of, part_lengths, samples_in, sizes_of
from retime.foundations.patching import replaced_attributes
from retime.foundations.preserve_state import CompiledCode
from retime.foundations.storages import strided_bytes, tensors_in
from retime.mechanisms.memory_budget.dry_run import everything
from retime.mechanisms.memory_budget.offload import HostTier, OffloadReport, OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory_budget.plan_files import GivenPlans, plans_in, state_of
from retime.mechanisms.memory_budget.planner import FirstSteps, Step, StepPlanner
from retime.mechanisms.memory_budget.report import BudgetReport, GraphPaths, PlannedShape, warn_of_paths
from retime.mechanisms.memory_budget.search import PlanChoice, plan_after
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError

# The memory that a budget counts beside what a step makes, and what freed memory may be kept.


class MemoryLimit:
    """Keeps a process to what its plans need.

    Args:
        hidden_bytes: of tensors that nothing in Python holds: freed memory leaves room for them.

    Attributes:
        hidden_bytes: as given; may be set anew.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], hidden_bytes: int = 0) -> None:
        self._model, self._optimizers, self.hidden_bytes = model, optimizers, hidden_bytes
        device = next(model.parameters()).device
        self.freed = FreedMemory(device)
        self._process: PeakWatch | None = None
        if device.type == "cpu":
            with suppress(OSError, LookupError):  # no Linux, or a kernel that does not forget peaks
                self._process = PeakWatch()
        self._model_bytes = self._standing_bytes = strided_bytes(self._between_steps(()))

    def limit(self, batch: Any, nbytes: int) -> None:
        """Freed memory is kept for the next tensors as far as there is room for it in ``nbytes``."""
        self.freed.hold(max(0, nbytes - self.hidden_bytes), self._between_steps(batch))

    def needed_bytes(self) -> int | None:
        """Bytes that are there between steps, and the most that tensors held beside since the first step began.

        None where it cannot be measured.
        """
        more = self.freed.peak_bytes()
        return None if more is None else more + self.hidden_bytes + strided_bytes(self._between_steps(()))

    def grown_bytes(self) -> int:
        """The most that the process has grown by so far, with the model that was there; 0 where it cannot be told."""
        return 0 if self._process is None else self._process.read() - self._process.begin_bytes + self._model_bytes

    def begin_first_step(self, batch: Any) -> None:
        """Count :meth:`allocated_bytes` from now on."""
        self._standing_bytes = strided_bytes(self._between_steps(batch))
        self.freed.forget_peak()

    def allocated_bytes(self) -> int:
        """The most that tensors held since :meth:`begin_first_step`; 0 where it cannot be measured."""
        more = self.freed.peak_bytes()
        return 0 if more is None else more + self.hidden_bytes + self._standing_bytes

    def _between_steps(self, batch: Any) -> list[Tensor]:
        states = [tensors_in(list(optimizer.state.values())) for optimizer in self._optimizers]
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return [*self._model.parameters(), *self._model.buffers(), *gradients, *chain(*states), *tensors_in(batch)]


Key = tuple[Any, ...]


# What plans go by of one batch, found out once and passed along.


class BatchRecord:
    """A batch that comes now, with what decides which plan it runs under.

    Args:
        whole: it is never cut, so that it counts as one sample where nobody can tell how many there are.

    Attributes:
        key: everything of its shape but how many samples it has, and the model as it is.
        sizes: bytes of each of its tensors.
    """

    def __init__(self, batch: Any, model: nn.Module, gradients: str, split: Split, *, whole: bool = False) -> None:
        self.batch, self.key = batch, key_of(batch, model, gradients)
        self.samples, self.sizes = 1, sizes_of(batch)
        try:
            self.samples = samples_in(batch, split)
        except ValueError:
            if not whole:
                raise

    @property
    def name(self) -> str:
        """The key as text, for checkpoints and files."""
        return name_of(self.key)

    def fits(self, samples: int, sizes: tuple[int, ...]) -> bool:
        """Tell if it is no larger than a batch of so many samples and these sizes: those of graphs differ in size."""
        return _no_larger((self.samples, *self.sizes), (samples, *sizes))

    def without_batch(self) -> BatchRecord:
        """The same of a batch that may go."""
        record = copy(self)
        record.batch = ()
        return record


def _no_larger(sizes: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return len(sizes) == len(others) and all(one <= other for one, other in zip(sizes, others, strict=True))


MOST_PLANS = 128
"""So many plans are kept, those used last."""


@dataclass
class _Entry:
    shape: PlannedShape
    sizes: tuple[int, ...]
    paths: GraphPaths


# The plans that batches run under, by what they were made for.


class PlanCache:
    """The plans of each key, with the sizes they were made for and the graph paths that were seen under them.

    A key has several plans where each is for more of something, as batches of more nodes and of more edges are. Plans
    of an earlier run wait by name, until a batch that they were made for comes.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, list[_Entry]] = {}  # used longest ago first
        self._earlier: dict[str, PlannedShape] = {}
        self._unexamined: set[Key] = set()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def _of(self, record: BatchRecord) -> _Entry | None:
        """The one used last of those that hold for a batch."""
        entries = reversed(self._entries.get(record.key, ()))
        return next((one for one in entries if record.fits(one.shape.samples, one.sizes)), None)

    def find(self, record: BatchRecord) -> PlannedShape | None:
        """The plan that holds for a batch; None if there is none."""
        entry = self._of(record)
        return None if entry is None else entry.shape

    def paths(self, record: BatchRecord) -> GraphPaths:
        """The graph paths that were seen under a batch's plan; new ones where there is no plan."""
        entry = self._of(record)
        return GraphPaths() if entry is None else entry.paths

    def add(self, record: BatchRecord, shape: PlannedShape) -> None:
        """Batches like this one, and smaller ones, run under this plan from now on, and under no earlier one."""
        entries = self._others(record)
        self._entries.pop(record.key, None)
        self._unexamined.discard(record.key)
        constants = shape.certificate is not None and shape.certificate.constants
        self._entries[record.key] = [*entries, _Entry(shape, record.sizes, GraphPaths(constants))]
        while len(self) > MOST_PLANS:
            key, (_, *newer) = next(iter(self._entries.items()))
            self._keep(key, newer)

    def _keep(self, key: Key, entries: list[_Entry]) -> None:
        self._entries[key] = entries
        if not entries:
            del self._entries[key]

    def _others(self, record: BatchRecord) -> list[_Entry]:
        """The plans of a key that stay when this batch is planned: those for more of one thing and less of another."""
        ours, others = (record.samples, *record.sizes), []
        for entry in self._entries.get(record.key, ()):
            theirs = (entry.shape.samples, *entry.sizes)
            if not _no_larger(theirs, ours) and not _no_larger(ours, theirs):
                others.append(entry)
        return others

    def use(self, record: BatchRecord) -> None:
        """The plan of this batch is the one used last."""
        entry = self._of(record)
        entries = self._entries.pop(record.key)
        self._entries[record.key] = sorted(entries, key=lambda one: one is entry)

    def recertify(self, record: BatchRecord, certificate: Certificate) -> PlannedShape:
        """More is known of whether this batch may be split; returns the plan with that."""
        entry = self._of(record)
        assert entry is not None
        entry.shape = replace(entry.shape, certificate=certificate)
        return entry.shape

    def renew(self, record: BatchRecord, before: PlannedShape, now: PlannedShape) -> None:
        """More is known of a plan, if it is still there."""
        for entry in self._entries.get(record.key, ()):
            if entry.shape is before:
                entry.shape = now

    def drop(self, plan: OffloadPlan) -> None:
        """It does not hold: nothing runs under it any more, nor takes it up from an earlier run."""
        for key, entries in list(self._entries.items()):
            dropped = [entry for entry in entries if entry.shape.choice.plan == plan]
            if any(entry.paths.new for entry in dropped):
                self._unexamined.add(key)
            self._keep(key, [entry for entry in entries if entry not in dropped])
        self._earlier = {name: shape for name, shape in self._earlier.items() if shape.choice.plan != plan}

    def shapes(self, but: BatchRecord | None = None) -> list[PlannedShape]:
        """All that is planned, used longest ago first; without what goes when this batch is planned."""
        stay = {} if but is None else {but.key: self._others(but)}
        return [entry.shape for entries in {**self._entries, **stay}.values() for entry in entries]

    def same_shape(self, record: BatchRecord) -> bool:
        """Return whether there is a plan for such batches and another state of the model."""
        return any(key[-1] == record.key[-1] for key in self._entries if key != record.key)

    def unexamined(self) -> bool:
        """Return whether a batch took a graph path that no later one was examined for."""
        return bool(self._unexamined) or any(entry.paths.new for entry in chain(*self._entries.values()))

    def earlier(self, record: BatchRecord) -> PlannedShape | None:
        """An earlier run's plan for a batch like this one."""
        shape = self._earlier.get(record.name)
        return None if shape is None or record.samples > shape.samples else shape

    def state(self, made_for: Mapping[str, Any]) -> dict[str, Any]:
        """The plans used last of all keys in plain types, and what they were made for."""
        return state_of(made_for, {name_of(key): entries[-1].shape for key, entries in self._entries.items()})

    def load(self, state: object, made_for: Mapping[str, Any]) -> None:
        """Take up what :meth:`state` gave in an earlier run.

        Raises:
            OtherPlansError: it was made for something else.
            ScheduleError: this is no such state.
        """
        self._earlier = plans_in(state, made_for)


# The one :class:`OffloadSavedTensors` of each plan that is in use, and what they all moved.


class Offloads:
    """Plans' storages go to ``host``."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._of: dict[OffloadPlan, OffloadSavedTensors] = {}
        self._gone: OffloadReport | None = None

    @contextmanager
    def around(
        self, choice: PlanChoice, keep: Iterable[Tensor], on_mismatch: Callable[[PlanMismatch], None]
    ) -> Iterator[None]:
        """Around a forward pass under a plan that offloads something; arguments as for :class:`OffloadSavedTensors`."""
        offload = self._of.get(choice.plan)
        if offload is None:
            offload = self._of[choice.plan] = OffloadSavedTensors(
                choice.plan, self._host, in_flight_bytes=choice.in_flight_bytes, on_mismatch=on_mismatch
            )
        offload.keep, offload.in_flight_bytes = keep, choice.in_flight_bytes
        try:
            with offload:
                yield
        finally:
            offload.keep = ()  # the batch may go when the step has ended

    def sizes(self, plan: OffloadPlan) -> list[int]:
        """Bytes of each storage that the last forward pass under a plan saved, by number."""
        return self._of[plan].sizes if plan in self._of else []

    def forget(self, plan: OffloadPlan) -> None:
        """A plan is used no more; what it moved still counts."""
        offload = self._of.pop(plan, None)
        if offload is not None:
            self._gone = OffloadReport.total([offload.report(), *filter(None, [self._gone])])

    def keep_only(self, plans: Container[OffloadPlan]) -> None:
        """Forget all other plans, but not before their last backward pass has ended: then at a later call."""
        for plan in [plan for plan in self._of if plan not in plans and self.ended(plan)]:
            self.forget(plan)

    def ended(self, plan: OffloadPlan) -> bool:
        """Return whether no backward pass is to come of what a plan moved."""
        return plan not in self._of or self._of[plan].ended

    def forget_all(self) -> None:
        """No plan is used any more."""
        for plan in list(self._of):
            self.forget(plan)

    def __len__(self) -> int:
        return len(self._of)

    def report(self) -> OffloadReport | None:
        """Report of what was moved under all plans; None if nothing was to be."""
        return OffloadReport.total([*(offload.report() for offload in self._of.values()), *filter(None, [self._gone])])


_AFTER = "made from what the first step saved and held, without a dry run"
_MANY_MISMATCHES = 3


@dataclass
class _OffloadedFirst:
    record: BatchRecord
    sizes: list[int]
    """Of the storages that it saved, by number."""
    needed_bytes: int | None = None


class BatchPlans:
    """The plans of one model's batches.

    Attributes:
        book: the plans so far.
        first: first steps that run without one.
        memory: what is held beside what a step makes.
    """

    def __init__(self, planner: StepPlanner, offloads: Offloads, report: BudgetReport, compiled: CompiledCode) -> None:
        self.planner, self.book, self.options = planner, PlanCache(), planner.options
        self.first = FirstSteps(planner)
        self._first_step: tuple[BatchRecord, PlannedShape] | None = None
        self._offloaded_first: list[_OffloadedFirst] = []
        self._given = None if self.options.plan is None else GivenPlans(self.options.plan, planner)
        self.memory = MemoryLimit(planner.model, planner.optimizers, self.options.hidden_bytes)
        self._offloads, self._report, self._compiled = offloads, report, compiled

    def first_or_plan(self, step: Step, record: BatchRecord, may_stop: bool = True) -> PlannedShape:
        """Plan, or return what the first step of a shape is to run under, which is trained to find out the rest."""
        self.measure_first()
        self._first_step = None
        self._plan_offloaded_first(record.batch)
        is_decided = self.book.find(record) is not None or (self.book and self.options.on_shape_change == "error")
        if is_decided or self._given is not None:
            return self.plan(step, record)
        may_stop = may_stop and self.options.may_stop and self.options.make_plan is None
        first = self.first.begin(record.key, record.batch, record.samples, may_stop)
        if first is None:
            return self.plan(step, record)
        self.memory.limit(record.batch, self.planner.budget_bytes)
        return first

    def plan(self, step: Step, record: BatchRecord) -> PlannedShape:
        """Plan for batches like this one; made now if there is none yet.

        Raises:
            BudgetError: the budget is below the floor.
            ScheduleError: a batch of another shape, with ``on_shape_change="error"``.
        """
        shape = self.book.find(record)
        if shape is not None:
            shape = self._examined(step, record, shape)
            if shape is not None:
                self.book.use(record)
                return shape
        if self.book and self.options.on_shape_change == "error":
            if self.book.same_shape(record):
                raise ScheduleError(
                    "the plan no longer holds, and on_shape_change='error': layers were frozen, unfrozen or put into "
                    "another mode, gradients now stay from batch to batch, or samples are larger. Use "
                    "on_shape_change='replan'"
                )
            raise ScheduleError(
                f"a batch of {record.samples} samples has another shape than the planned batch, and "
                "on_shape_change='error': bring all batches to one shape, or use on_shape_change='replan'"
            )
        return self._plan_anew(step, record)

    def _examined(self, step: Step, record: BatchRecord, shape: PlannedShape) -> PlannedShape | None:
        """The same, if sub-batches that took another path than those before are as separable; else None: plan anew."""
        paths = self.book.paths(record)
        if not paths.new or shape.certificate is None or record.samples < 2:
            return shape
        self.options.say("the step computes something else than the planned batch")
        with self.room(record.batch):
            again = self.planner.certify(step, record.batch, among=shape.certificate)
        stopped = paths.accept()
        warn_of_paths(again, paths, stopped)
        return self.book.recertify(record, again) if again.separable else None

    def _plan_anew(self, step: Step, record: BatchRecord) -> PlannedShape:
        self.options.say(
            f"planning a batch of {record.samples} samples for {show_bytes(self.planner.budget_bytes)}; it is "
            "trained afterwards, and save_plan() keeps the plan for other runs. Dry runs, a probe and trials call the "
            "step more often than training does; dry_run='off' does without them"
        )
        self.memory.limit(record.batch, self.planner.budget_bytes)
        with self.planner.trying_out(), self._compiled.looked_for():
            shape = self._with_sizes_checked(step, record, self._made_or_taken(step, record))
        if not shape.plain:
            self._compiled.warn()
        self.memory.freed.trim()  # planning is over: what it took is the steps'
        return self.keep(record, shape)

    def _made_or_taken(self, step: Step, record: BatchRecord) -> PlannedShape:
        batch, samples = record.batch, record.samples
        if self._given is not None:
            return self._given.plan(record.name, step, batch, samples, dry=self.options.dry_run != "off")
        earlier = self.book.earlier(record)
        taken = None if earlier is None else self.planner.of_saved(earlier, step, batch, samples)
        if taken is not None:
            return taken
        make = self.options.make_plan or StepPlanner.make
        shape = make(self.planner, step, batch, samples)
        return replace(shape, note="; ".join(filter(None, (shape.note, self.memory.freed.note))))

    def _with_sizes_checked(self, step: Step, record: BatchRecord, shape: PlannedShape) -> PlannedShape:
        """The same, once its parts are known to do what the probed samples do; else a plan for the whole batch.

        The first batch would find it out too, but has no room for a dry run.
        """
        certificate = shape.certificate
        if certificate is None or not certificate.samples:
            return shape
        sub_batch = min(shape.choice.plan.sub_batch, record.samples)
        sizes = {record.samples, *part_lengths(record.samples, -(-record.samples // sub_batch))} - certificate.sizes
        verified = self.planner.check_sizes(step, record.batch, certificate, sizes) if sizes else certificate
        if verified.separable:
            return replace(shape, certificate=verified)
        with self._kept_whole(verified.reason):
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
        """Run batches like this one under this plan from now on."""
        self._reserve([*self.book.shapes(but=record), shape])
        self.book.add(record, shape)
        self._report.note(shape, MOST_PLANS)
        self._first_step = None if shape.first_step_bytes is None else (record.without_batch(), shape)
        self._limit_freed(record.batch)
        self.options.say(str(shape))
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

    def offloaded_first(self, record: BatchRecord) -> None:
        """Note what the first step of a shape saves, everything offloaded: the next batch begins with a plan for it."""
        sizes = [*self._offloads.sizes(everything(record.samples))]
        self._offloaded_first.append(_OffloadedFirst(record.without_batch(), sizes))

    def _plan_offloaded_first(self, batch: Any) -> None:
        """Keep plans that follow from first steps, everything offloaded, whose backward passes have ended.

        Raises:
            BudgetError: one held more than the budget.
        """
        needed_bytes = self.memory.needed_bytes() if self._offloaded_first else None
        waiting, self._offloaded_first = self._offloaded_first, []
        for first in waiting:
            record, plan = first.record, everything(first.record.samples)
            if needed_bytes is not None:  # what is counted begins anew with the next first step
                first.needed_bytes = max(first.needed_bytes or 0, needed_bytes + sum(record.sizes))
            if not self._offloads.ended(plan):
                self._offloaded_first.append(first)
            elif self.book.find(record) is None:
                choice = plan_after(record.samples, first.sizes, first.needed_bytes, self.planner.budget_bytes)
                self._offloads.forget(plan)
                self.keep(record, PlannedShape(record.samples, choice, note=_AFTER))
                self._limit_freed(batch)

    def keep_whole(self, step: Step, record: BatchRecord, reason: str) -> None:
        """Batches like this one are not split any more."""
        with self._kept_whole(reason):
            self._plan_anew(step, record)

    def _kept_whole(self, reason: str) -> AbstractContextManager[None]:
        """Plan inside for a batch that showed more than those before, which ran in sub-batches."""
        warn_no_effect(f"batches of this shape run whole from here on, with another plan: {reason}", every_rank=True)
        return replaced_attributes(self.planner, whole_because=reason)

    def drop_mismatched(self, plan: OffloadPlan, mismatch: PlanMismatch) -> None:
        """A forward pass under this plan saved something else: the next batch is planned anew.

        Raises:
            PlanMismatch: with ``on_shape_change="error"``.
        """
        if self.options.on_shape_change == "error":
            raise mismatch
        reason = "a forward pass saved other storages than planned"
        times = self._report.replanned[reason] = self._report.replanned.get(reason, 0) + 1
        self.book.drop(plan)
        self.options.say(f"{mismatch}; the next batch of this shape is planned again")
        if times == _MANY_MISMATCHES:
            warn_no_effect(
                f"{times} batches were planned again because {reason}, which takes longer than a step: the model takes "
                "another path from step to step (dropped layers, branches on values or on the step's number). Keep it "
                "on one path, or give a budget that the plain step fits into",
                every_rank=True,
            )

    def hide(self, hidden_bytes: int, batch: Any) -> None:
        """Note that nothing in Python holds so many bytes of tensors from now on, in batches like this one."""
        self.memory.hidden_bytes = hidden_bytes
        self._limit_freed(batch)

    def _reserve(self, shapes: Sequence[PlannedShape]) -> None:
        """Have the space on the host that the plans of these need, one at a time."""
        away = [shape for shape in shapes if shape.choice.plan.offload]
        if away:
            nbytes = max(shape.choice.out_bytes // -(-shape.samples // shape.choice.plan.sub_batch) for shape in away)
            self.planner.host.reserve(nbytes, max(len(shape.choice.plan.offload) for shape in away))

    def _limit_freed(self, batch: Any) -> None:
        """Limit what freed memory may hold together with tensors: to as much as the largest plan."""
        if self.book:
            reserved = max(shape.choice.reserved_bytes(self.planner.budget_bytes) for shape in self.book.shapes())
            self.memory.limit(batch, reserved)
