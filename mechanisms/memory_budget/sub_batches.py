"""One training step in sub-batches whose gradients add up to the batch's (moDNN, sections 4.2 and 5.1).

    certificate = certify(step, batch, model)            # once, with the first batch
    ...
    optimizer.zero_grad()
    output = SubBatches(model, step, batch, 4, certificate).run()    # forward and backward, 4 samples at a time
    optimizer.step()

Only one sub-batch's activations live at a time, so memory goes with ``sub_batch`` and not with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from retime.foundations.messages import warn_difference
from retime.foundations.parts import (
    Certificate,
    NotSeparableError,
    Split,
    Weighting,
    WeightsUnclearError,
    WholeOutput,
    balanced_parts,
    ghost_momentum,
    loss_of,
    loss_weights,
    samples_in,
    split_batch,
)
from retime.foundations.preserve_state import LARGE_BYTES, CompiledCode, random_state, set_random_state
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private.nn_and_optim import own_buffers
from retime.mechanisms.memory_budget.dry_run import EVERYTHING, TooMuchAllocated
from retime.mechanisms.memory_budget.offload import PlanMismatch
from retime.mechanisms.memory_budget.planner import Step
from retime.mechanisms.memory_budget.plans import BatchPlans, BatchRecord, Offloads
from retime.mechanisms.memory_budget.report import AnotherPath, BudgetReport, GraphPaths, PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.mechanisms.memory_budget.separability import check_sizes
from retime.schedules.budget import OffloadPlan


class SubBatches:
    """A batch in parts; :meth:`run` does all of it, :meth:`forward` and :meth:`weighted` one part at a time.

    Args:
        step: computes on a batch and returns the loss, or a mapping or object with ``loss``.
        sub_batch: the most samples that go through the model at once; parts are as few and as equal as that allows
            (:func:`~retime.foundations.parts.split.balanced_parts`).
        certificate: from :func:`~retime.mechanisms.memory_budget.separability.certify.certify`.
        split: a ``split_batch`` hook for batches that cannot be cut by their first dimension.
        compare: whether the step does the same with batches of other sizes than are known; as default it is run
            without values.
        ghost: BatchNorm layers take their statistics from each sub-batch, by the user's choice: their momentum is made
            smaller meanwhile (:func:`~retime.foundations.parts.combine.ghost_momentum`).

    Attributes:
        certificate: the one in force; keep it for the next batch.
        parts, samples, weights: of each sub-batch, in order. A batch of at most ``sub_batch`` samples is one part of
            weight 1, whatever the certificate says.
        guessed: places of scalars that are averaged by samples, since the certificate does not say how they add up:
            before the first part those that were probed, later also others that came up.

    Raises:
        NotSeparableError: the gradients would not add up.
        WeightsUnclearError: terms of the loss weigh the parts of this batch differently.
        ValueError: the batch cannot be split.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[Any], Any],
        batch: Any,
        sub_batch: int,
        certificate: Certificate,
        *,
        split: Split = split_batch,
        compare: Callable[[Any, Certificate, Collection[int]], Certificate] | None = None,
        ghost: bool = False,
    ) -> None:
        self._model, self._step, self._ghost = model, step, ghost
        self.certificate = certificate
        self.parts = balanced_parts(batch, sub_batch, split)
        self.samples = [samples_in(part, split) for part in self.parts]
        self.weights = [1.0]
        self.guessed: set[str] = set()
        if len(self.parts) > 1:
            self.weights = loss_weights(certificate, self.parts, self.samples)
            sizes = {*self.samples, sum(self.samples)}
            if self.certificate.samples and not sizes <= self.certificate.sizes:
                compare = compare or (
                    lambda whole, prior, new: check_sizes(step, whole, model, prior, new, split=split, ghost=ghost)
                )
                self.certificate = compare(batch, self.certificate, sizes - self.certificate.sizes)
                if not self.certificate.separable:
                    raise NotSeparableError(self.certificate.reason)
            self.guessed.update(self.certificate.unclear)
        self._outputs = WholeOutput(self.samples)

    def __len__(self) -> int:
        return len(self.parts)

    def forward(self, index: int) -> Any:
        """Run the step on one part and return what it returns; keeps what :meth:`result` needs of it, detached.

        Parts are run in order, each once.

        Raises:
            RuntimeError: it is not this part's turn.
        """
        if index != len(self._outputs):
            raise RuntimeError(f"sub-batch {index} is not next: run {len(self._outputs)} of {len(self)} first")
        output = self.compute(index)
        self._outputs.add(output)
        return output

    def compute(self, index: int) -> Any:
        """Run the step on one part and return its output; nothing is kept of it."""
        part = self.parts[index]
        before = dict(part) if isinstance(part, dict) and len(self) > 1 else {}
        with ghost_momentum(self._model, len(self)) if self._ghost else nullcontext():
            output = self._step(part)
        if before and (written := [key for key, value in part.items() if before.get(key, before) is not value]):
            warn_difference(
                f"under a memory budget the step gets parts of a batch, so what it puts into it ({written}) is not "
                "there afterwards: return it beside the loss"
            )
        return output

    def weighted(self, index: int, loss: Tensor) -> Tensor | None:
        """The loss to run the backward pass of one part from; None where the part has nothing to learn from."""
        weight = self.weights[index]
        if weight == 1:
            return loss
        return loss * weight if weight else None

    def run(self, backward: Callable[[Tensor], Any] | None = None, start: int = 0) -> Any:
        """Forward and backward of all parts from ``start`` on; returns :meth:`result`.

        Args:
            backward: what to do with each part's weighted loss; ``loss.backward()`` as default.
            start: the first part that has not been run, for callers that ran others by themselves.
        """
        backward = backward or (lambda weighted: weighted.backward())  # type: ignore[no-untyped-call]
        for index in range(start, len(self)):
            loss = self.weighted(index, loss_of(self.forward(index)))
            if loss is not None:
                backward(loss)
            del loss  # else this part's graph would live on through the next part's forward pass
        return self.result()

    def result(self) -> Any:
        """Output that the step would have returned for the whole batch, detached.

        The loss is exact; so are the scalars that the certificate knows how to add up. Other scalars are averaged by
        samples.

        Raises:
            RuntimeError: not all parts have been run.
        """
        if len(self._outputs) < len(self):
            raise RuntimeError(f"only {len(self._outputs)} of {len(self)} sub-batches have been run")
        return self._outputs.result(self.weights_of)

    def weights_of(self, place: str) -> list[float]:
        """The parts' weights for a scalar that the step returns at ``place``; the loss's own for the loss."""
        if len(self) == 1 or place in ("output", "output['loss']", "output.loss"):
            return self.weights
        if place not in self.certificate.outputs:
            self.guessed.add(place)
        weighting = self.certificate.outputs.get(place, Weighting("mean"))
        return self.weights if weighting == self.certificate.weighting else weighting.of(self.parts, self.samples)


# Runs batches under the plans that were decided: cuts them, and goes forward with storages offloaded.


class PlannedBatches:
    """The batch that is under way.

    Args:
        plans: decides under which plan a batch runs, and is told what it showed.
        offloads, compiled, report: of the same step.

    Attributes:
        now: its sub-batches; None if there is no such batch.
        stopped: it was stopped in its forward pass, and has not begun again.
    """

    def __init__(self, plans: BatchPlans, offloads: Offloads, compiled: CompiledCode, report: BudgetReport) -> None:
        self.now: SubBatches | None = None
        self.stopped = False
        self._now_plain = True
        self._plans, self._offloads, self._compiled, self._report = plans, offloads, compiled, report

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

        def compare(whole: Any, certificate: Certificate, sizes: Collection[int]) -> Certificate:
            with self._plans.room(record.batch):
                return planner.check_sizes(step, whole, certificate, sizes)

        try:
            now = SubBatches(
                planner.model,
                forward,
                record.batch,
                max(1, sub_batch),
                shape.certificate or Certificate(None, "this batch is not to be split"),
                split=planner.options.split,
                compare=compare,
                ghost=planner.options.batchnorm == "ghost",
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
        planner = self._plans.planner
        whole = Certificate(None, "this batch is not to be split")
        self.now = SubBatches(planner.model, step, record.batch, record.samples, whole, split=planner.options.split)
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
        self._offloads.keep_only({entry.choice.plan for entry in (*self._plans.book.shapes(), shape)})

    def _forward(self, step: Step, part: Any, shape: PlannedShape, paths: GraphPaths) -> Any:
        with self._hooks(part, shape.choice), self._compiled.under(shape.plain):
            if shape.certificate is None:
                return step(part)
            begins = not paths.passes and self.now is not None and len(self.now) > 1
            random, state = (random_state(), self._state()) if begins else (None, [])
            output = paths.run(step, part)
            if paths.new_at_once and random is not None:
                del output  # there is to be room for what is done next
                set_random_state(random)
                for held, name, value, before in state:
                    if isinstance(before, Tensor):
                        value.detach().copy_(before)
                    elif before is not None:
                        value[:] = before
                    held[name] = value
                self._uncount(self.drop())
                paths.stopped = self.stopped = True
                raise AnotherPath
            return output

    def _state(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """Buffers, and the attributes of modules that are not torch's, with the values of small tensors and of lists.

        A pass that is stopped has written into none of them, and a metric has not counted its samples.
        """
        modules = list(self._plans.planner.model.modules())
        state = [
            (held, name, one, one.clone())
            for held in map(own_buffers, modules)
            for name, one in held.items()
            if one is not None
        ]
        for held in (vars(module) for module in modules if not type(module).__module__.startswith("torch.")):
            for name, value in held.items():
                before: Any = value.copy() if isinstance(value, list) else None
                if isinstance(value, Tensor) and value.nbytes <= LARGE_BYTES and not value.is_inference():
                    before = value.detach().clone()
                state.append((held, name, value, before))
        return state

    @contextmanager
    def _finding_out(self, record: BatchRecord, shape: PlannedShape) -> Iterator[None]:
        """Around the forward pass of a batch that is trained to find out what its shape needs.

        Raises:
            TooMuchAllocated: it has to be planned for; nothing has happened.
        """
        plans = self._plans
        plans.memory.begin_first_step(record.batch)
        entries = dict(record.batch) if isinstance(record.batch, MutableMapping) else {}
        try:
            with plans.first.counted(record.key, record.batch, shape.samples) as shapes:
                yield
        except TooMuchAllocated:
            self._uncount(self.drop())
            if entries:  # a step may take labels out of its batch
                record.batch.clear()
                record.batch.update(entries)
            raise
        for planned in shapes:
            plans.keep(record, planned)
        if not shapes:
            plans.offloaded_first(record)

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
