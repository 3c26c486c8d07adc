"""Runs of one training step on stand-ins, with fake tensors or with copies: traced, or only measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.measure import MemoryProbe
from retime.foundations.messages import parse_bytes
from retime.foundations.parts import has_entries, loss_of, part_lengths, tensors_of
from retime.foundations.preserve_state import (
    DryMode,
    ExternalTensors,
    Replacement,
    ValueReadError,
    aliases,
    copies,
    fake,
    stand_in_optimizer,
    stand_ins,
)
from retime.foundations.storages import has_storage, tensors_in
from retime.foundations.torch_private.engine import (
    LOCAL_SCALAR_DENSE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    tree_map,
    without_dispatch_modes,
)
from retime.mechanisms.memory_budget.dry_run.profile import StepProfile
from retime.mechanisms.memory_budget.dry_run.trace import Meter, Tracer
from retime.mechanisms.memory_budget.offload import HostMemory, HostNull, HostTier, OffloadSavedTensors, PlanMismatch
from retime.schedules.budget import MOST_SAVED, BlockKind, OffloadPlan, Phase

# What holds gradients, and when: choices of a :class:`TrainingStep`.

Gradients = Literal["freed", "freed after forward", "kept"]
Buckets = Literal["", "beside", "gradients"]


def check_held(gradients: str, buckets: str) -> None:
    """Raise what there is to choose from if these are no choices.

    Raises:
        ValueError: an unknown choice.
    """
    for name, choice, choices in (("gradients", gradients, Gradients), ("buckets", buckets, Buckets)):
        if choice not in get_args(choices):
            raise ValueError(f"{name}={choice!r} is none of {', '.join(map(repr, get_args(choices)))}")


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Nobody holds gradients in ``.grad`` any more."""
    for parameter in parameters:
        parameter.grad = None


# What training holds of the outputs of a batch's parts, of which a dry run makes only two.


def outputs_of_others(tracer: Tracer, output: object, size: int, count: int, samples: int) -> list[Tensor]:
    """Stand-ins, counted from now on: a whole batch of so many samples, and what parts keep that are not run.

    Tensors with one entry a sample are joined (:class:`~retime.foundations.parts.combine.WholeOutput`); all others each
    part keeps.

    Args:
        tracer: has just seen the first part's forward pass.
        output: of that part.
        size: samples of it.
        count: parts of the batch; the output of a batch in one piece stays as it is.
        samples: of the batch.
    """
    if count == 1:
        return []
    leaves, trace = list(tensors_of(output).values()), tracer.trace
    apart = [leaf for leaf in leaves if has_storage(leaf) and not has_entries(leaf, size)]
    indices = {tracer.index_of(leaf.untyped_storage()) for leaf in apart}
    storages = [trace.storages[index] for index in indices if index is not None]
    # Storages that the part has made; those of the model and the batch are there anyway.
    new_bytes = sum(storage.nbytes for storage in storages if storage.born >= trace.starts[-1])
    with tracer.inside():
        tensors = [
            torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
            for leaf in leaves
            if has_entries(leaf, size)
        ]
        # Also where there are no other parts: runs of all sub-batch sizes are to make the same storages.
        tensors.append(torch.empty((count - 2) * new_bytes, dtype=torch.uint8, device="meta"))
        for one in tensors:
            tracer.mark(one, BlockKind.ACTIVATION)
    return tensors


# One training step as data: what a dry run needs to know of it.


def take(batch: Any, first: int, last: int) -> Any:
    """Samples ``first`` to ``last - 1`` of every tensor in ``batch``, along dimension 0; scalars stay as they are."""

    def part(leaf: Any) -> Any:
        return leaf[first:last] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return tree_map(part, batch)


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One training step, as far as memory is concerned.

    Args:
        module: all parameters and buffers that ``loss`` uses.
        batch: a whole batch, any nesting that torch's pytrees know. Fake or meta tensors will do.
        loss: runs the forward pass on a batch or a part of it and returns the scalar to differentiate, or a mapping or
            object with it as ``loss``: all of that is held to the step's end, as training does. It reads parameters
            from ``module`` at each call.
        optimizers: run at the end, each once.
        split: takes a part out of a batch.
        gradients: what the gradients of the step before do. ``"freed"``: they are gone when the step begins;
            ``"freed after forward"``: gone after the first forward pass, as under Lightning's automatic optimization;
            ``"kept"``: they are zeroed in place, or were accumulated before. Those of parameters that none of the
            optimizers has are kept at all times, for nobody frees them.
        buckets: memory of the size of all gradients that DistributedDataParallel holds from the start. ``"beside"``
            them; or ``"gradients"``: it is theirs (``gradient_as_bucket_view``), but for those of sub-batches, which
            are apart until the last one.
        reduction_bytes: that reducing them takes, at whatever time.
        whole: samples of the batch that this one is a part of; 0: it is no part.
        beside: what a backward pass may give gradients to beside ``module``, to be filled in: what optimizers update.
    """

    module: nn.Module
    batch: Any
    samples: int
    loss: Callable[[Any], Any]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    split: Callable[[Any, int, int], Any] = take
    gradients: Gradients = "freed"
    buckets: Buckets = ""
    reduction_bytes: int = 0
    whole: int = 0
    beside: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        """Parts of the step have neither these optimizers nor, where it is a part of the batch, this batch."""
        check_held(self.gradients, self.buckets)
        object.__setattr__(self, "reduction_bytes", parse_bytes("reduction_bytes", self.reduction_bytes, least=0))
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        leaves = [tensor for tensor in tensors_in([groups, self.batch]) if tensor.is_leaf and tensor.requires_grad]
        beside = {id(tensor) for tensor in self.beside}
        more = tuple(tensor for tensor in leaves if id(tensor) not in beside)
        object.__setattr__(self, "beside", self.beside + more)

    def of_size(self, samples: int) -> TrainingStep:
        """The same step on the first ``samples`` of the batch, and on nothing else."""
        whole = self.whole or self.samples
        return replace(self, batch=self.split(self.batch, 0, samples), samples=samples, whole=whole)

    def given(self) -> list[Tensor]:
        """Tensors that are there before the step: parameters, buffers and the batch."""
        return [*self.module.parameters(), *self.module.buffers(), *tensors_in(self.batch)]


# A step's optimizers over stand-ins, brought to the middle of training.


class StandInOptimizers:
    """Optimizers over the stand-ins of a step's parameters; made while these are in their places.

    Attributes:
        lasting: those of them whose gradients no ``zero_grad`` frees.
        not_run: classes of optimizers that cannot be run by themselves, so that their states are not known.
    """

    def __init__(self, step: TrainingStep, replacement: Replacement) -> None:
        self.not_run: list[str] = []
        self._optimizers = [stand_in_optimizer(optimizer, replacement) for optimizer in step.optimizers]
        self.trained = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
        groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
        updated = {id(one) for one in chain.from_iterable(groups)}
        # Without any optimizer all gradients are somebody else's.
        self.lasting = [one for one in self.trained if id(one) not in updated] if self._optimizers else []

    @property
    def states(self) -> list[list[Any]]:
        """Return the states of its parameters for each optimizer."""
        return [[list(state.values()) for state in one.state.values()] for one in self._optimizers]

    def update(self) -> None:
        """Run the optimizers; one that cannot be run alone (it wants a closure, or sparse gradients) is left out."""
        for optimizer in list(self._optimizers):
            try:
                optimizer.step()
            except Exception:  # whatever an optimizer says to a step that is not in the middle of training
                self._optimizers.remove(optimizer)
                self.not_run.append(type(optimizer).__name__)

    def complete(self, reached: Callable[[], set[int]]) -> None:
        """States appear in a parameter's first update; a step in the middle of training finds them there.

        Once an optimizer has some, a parameter without is a new one (thawed, or of a later group), or one that gets no
        gradients. An additional pass tells, and which gradients that no optimizer frees there are.

        Args:
            reached: runs that pass, and returns the ids of the parameters that got gradients.
        """
        fresh = [one for optimizer in self._optimizers for one in self._without_state(optimizer) if not optimizer.state]
        later = [one for optimizer in self._optimizers for one in self._without_state(optimizer) if optimizer.state]
        if later or self.lasting:
            ids = reached()
            later = [one for one in later if id(one) in ids]
            self.lasting = [one for one in self.lasting if id(one) in ids]
        if fresh or later:
            for parameter in (*fresh, *later):  # the others keep what they have: they are not updated
                parameter.grad = torch.zeros_like(parameter)
            with _AnyValue():  # type: ignore[no-untyped-call]
                self.update()
            drop_gradients(self.trained)

    def _without_state(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        trained = {id(parameter) for parameter in self.trained}
        groups = (group["params"] for group in optimizer.param_groups)
        return [one for one in chain.from_iterable(groups) if id(one) in trained and not optimizer.state.get(one)]


class _AnyValue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes up the values that fake tensors do not have: a step count, say."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is LOCAL_SCALAR_DENSE and isinstance(args[0], FakeTensor):
            return 0.5 if args[0].dtype.is_floating_point else 1  # no optimizer divides by 1 - 0.5
        return func(*args, **(kwargs or {}))


# Runs of a step on stand-ins, traced under a plan or untraced: forward and backward passes, the update.

_WITHOUT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def loss_in(output: Any) -> Tensor:
    """The scalar to differentiate; one that is returned as such needs no operation."""
    return output if isinstance(output, Tensor) and output.dim() == 0 else loss_of(output)


def ignore_mismatch(mismatch: PlanMismatch) -> None:
    """A plan that is for another number of saved storages is followed as far as it goes."""


class DryRun:
    """Stand-ins for all that a step changes, made once for many runs.

    Args:
        real: stand-ins are copies; see :func:`profile_step`.
        host: where real runs offload to; by default plain CPU memory.
        in_place: real runs read the model's own parameters instead of copies. For steps that do not write into them.
        own_batch: real runs get a copy of the batch. False for steps that do not write into it.

    Attributes:
        not_run: see :class:`StandInOptimizers`.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        real: bool = False,
        host: HostTier | None = None,
        in_place: bool = False,
        own_batch: bool = True,
    ) -> None:
        self.step = step
        self._offload: OffloadSavedTensors | None = None
        self._host = host or (HostMemory("cpu") if real else HostNull())
        self._mode: DryMode | None = None
        self._replacement = aliases() if in_place else copies()
        if not real:
            self._mode = DryMode()
            self._replacement = fake(self._mode)
        self._batch = self._replacement.batch(step.batch) if own_batch or not real else step.batch
        with self._staged():
            self._optimizers = StandInOptimizers(step, self._replacement)
            self.not_run = self._optimizers.not_run
            self._outside, self._watched = ExternalTensors(self._replacement.stand_ins), False
            with self._mode or nullcontext(), self._outside.put_back_after():
                self._optimizers.complete(self._reached)

    def run(
        self,
        plan: OffloadPlan,
        *,
        in_flight_bytes: int = 0,
        compare: bool = True,
        update: bool = True,
        meter: Meter | None = None,
        as_cut: bool = False,
    ) -> StepProfile:
        """Trace the step under a plan; see :func:`replay`.

        Args:
            plan, in_flight_bytes, compare: as there.
            as_cut: the parts have the sizes with which a batch is cut, nearly equal ones; otherwise all have the
                plan's size, as is needed to tell what depends on that.
            update: run the optimizers too; without activations they need the same under every plan.
            meter: is told about every operation.

        Raises:
            ValueReadError, PlanMismatch: as there.
        """
        tracer = Tracer(self.step.module, meter)
        with self._staged(), self._running():
            outliving = self._lay_out(tracer, plan.sub_batch < self.step.samples)
            try:
                with tracer.layers.watch(), tracer:
                    outliving += self._forward_backward(tracer, plan, in_flight_bytes, compare, as_cut)
                    if update:
                        tracer.layers.phase = Phase.UPDATE
                        self._optimizers.update()
            except _WITHOUT_VALUES as error:
                operations = tracer.trace.operations
                raise ValueReadError(
                    f"an operation of {operations[-1].layer if operations else 'the model'} cannot be run dry, because "
                    f"what it makes depends on values ({error})"
                ) from error
            finally:
                tracer.finished = True
                del outliving
                drop_gradients(self._optimizers.trained)
        return StepProfile(plan, self.step.samples, tracer.trace)

    def _lay_out(self, tracer: Tracer, parts: bool) -> list[Any]:
        """Count what is there before the step: parameters, the batch, optimizer states, perhaps gradients.

        Args:
            parts: the batch is cut into sub-batches.

        Returns:
            What of that nobody else holds.
        """
        module = self.step.module
        tracer.add(list(module.parameters()), BlockKind.WEIGHT)
        tracer.trace.parameters = len(tracer.trace.storages)
        tracer.add(list(module.buffers()), BlockKind.WEIGHT)
        tracer.add(self._batch, BlockKind.INPUT)
        tracer.add(self._optimizers.states, BlockKind.STATE)
        buckets: list[Any] = []
        if self.step.buckets == "beside" or (self.step.buckets and parts):
            buckets = [torch.empty_like(parameter, device="meta") for parameter in self._optimizers.trained]
        if self.step.reduction_bytes:
            buckets.append(torch.empty(self.step.reduction_bytes, dtype=torch.uint8, device="meta"))
        tracer.add(buckets, BlockKind.WEIGHT_GRADIENT)
        there = self._optimizers.lasting if self._gradients(parts) == "freed" else self._optimizers.trained
        for parameter in there:
            parameter.grad = torch.zeros_like(parameter)
        tracer.add([parameter.grad for parameter in there], BlockKind.WEIGHT_GRADIENT)
        return buckets

    def _gradients(self, parts: bool) -> str:
        """Gradients that are buckets are there at all times."""
        return "kept" if self.step.buckets == "gradients" and not parts else self.step.gradients

    def _forward_backward(
        self, tracer: Tracer, plan: OffloadPlan, in_flight_bytes: int, compare: bool, as_cut: bool
    ) -> list[Any]:
        """Run them for the first two sub-batches, or for the whole batch.

        Returns:
            What training holds to the step's end of what the step returned.
        """
        step, module = self.step, self.step.module
        fixed = [*module.parameters(), *module.buffers(), *tensors_in(self._batch)]
        on_mismatch = None if compare else ignore_mismatch
        offload = OffloadSavedTensors(
            plan, self._host, in_flight_bytes=in_flight_bytes, on_mismatch=on_mismatch, observer=tracer
        )
        count = -(-step.samples // plan.sub_batch)
        sizes = part_lengths(step.samples, count) if as_cut else [plan.sub_batch] * count
        first = 0
        outputs: list[Any] = []
        for size in sizes[:2]:  # all but the first find gradients, and none of them is larger than the second
            part = self._batch
            if count > 1:
                with tracer.inside():  # cutting is none of the step's operations
                    part = self._cut(first, min(first + size, step.samples))
                tracer.add(part, BlockKind.INPUT)
            tracer.layers.phase = Phase.FORWARD
            tracer.begin_pass()
            offload.keep = [*fixed, *tensors_in(part)]
            with offload:
                output = step.loss(part)
            offload.keep = ()
            if first:
                with tracer.inside():  # detaching is none of the step's operations
                    leaves = tensors_of(output).values()
                    outputs.append([leaf.detach() for leaf in leaves if not has_entries(leaf, size)])
                del leaves
            else:  # Lightning holds a batch's first as it is
                outputs += [output, *outputs_of_others(tracer, output, size, count, step.whole or step.samples)]
                if self._gradients(count > 1) == "freed after forward":
                    lasting = {id(parameter) for parameter in self._optimizers.lasting}
                    drop_gradients(
                        [parameter for parameter in self._optimizers.trained if id(parameter) not in lasting]
                    )
            loss = loss_in(output)
            del output
            tracer.layers.phase = Phase.BACKWARD
            loss.backward()  # type: ignore[no-untyped-call]
            del loss, part
            for parameter in self._optimizers.trained:
                if parameter.grad is not None:
                    tracer.mark(parameter.grad, BlockKind.WEIGHT_GRADIENT)
            first += size
        return outputs

    def _cut(self, first: int, last: int) -> Any:
        """A part of the batch; a hook that reads values gets the real one."""
        try:
            return self.step.split(self._batch, first, last)
        except (ValueReadError, *_WITHOUT_VALUES):
            if self._mode is None:
                raise
            with without_dispatch_modes():
                part = self.step.split(self.step.batch, first, last)
            return fake(self._mode).batch(part)

    def untraced(
        self, plan: OffloadPlan | None = None, probe: MemoryProbe | None = None, *, in_flight_bytes: int = 0
    ) -> None:
        """One forward and backward pass of the whole batch on the stand-ins, to be timed or to be measured."""
        module = self.step.module
        device = next(module.parameters()).device
        with self._staged(), self._running():
            if probe is not None:
                probe.start()
            if plan is None:
                output = self.step.loss(self._batch)
            else:
                offload = self._offloading(plan, in_flight_bytes)
                offload.keep = [*module.parameters(), *module.buffers(), *tensors_in(self._batch)]
                with offload:
                    output = self.step.loss(self._batch)
                offload.keep = ()
            loss_in(output).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if probe is not None:
                probe.stop()
            drop_gradients(self._optimizers.trained)

    def _offloading(self, plan: OffloadPlan, in_flight_bytes: int) -> OffloadSavedTensors:
        """The same for all runs under a plan, as in training: it does less once it knows what a pass saves."""
        offload = self._offload
        if offload is None or offload.plan != plan or offload.in_flight_bytes != in_flight_bytes:
            offload = OffloadSavedTensors(
                plan, self._host, in_flight_bytes=in_flight_bytes, on_mismatch=ignore_mismatch
            )
            self._offload = offload
        return offload

    @contextmanager
    def _staged(self) -> Iterator[None]:
        step, open_mode = self.step, self._mode.open() if self._mode else nullcontext()
        with open_mode, stand_ins(step.module, self._replacement, step.beside), torch.random.fork_rng(devices=[]):
            yield

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Watch the first real run only: later ones, which may be timed, write into the same tensors."""
        with self._mode or nullcontext(), self._outside.put_back_after(watched=not self._watched):
            yield
        self._watched = self._mode is None

    def _reached(self) -> set[int]:
        """Ids of the parameters that get gradients; of all trained ones where a step without values cannot tell."""
        try:
            loss_in(self.step.loss(self._batch)).backward()  # type: ignore[no-untyped-call]
            return {id(one) for one in self._optimizers.trained if one.grad is not None}
        except Exception:  # whatever the user's code says to tensors without values; the run itself will tell
            return {id(one) for one in self._optimizers.trained}
        finally:
            drop_gradients(self._optimizers.trained)


# Dry runs of a training step: what it needs, plain or under a plan, without using memory or touching the model.
#
# The step runs through the same :class:`OffloadSavedTensors` as in training, with fake tensors and a host that keeps
# nothing, so a replay's peak is what the tensors of the real step will hold, to the byte.

EVERYTHING = frozenset(range(MOST_SAVED))
"""Numbers of more storages than any step saves: those beyond the last one name nothing."""


def everything(sub_batch: int) -> OffloadPlan:
    """The plan that offloads all that a step saves, whatever its number."""
    return OffloadPlan(sub_batch, EVERYTHING, 0, saved=len(EVERYTHING))


@checked
def profile_step(
    step: TrainingStep, sub_batch: Annotated[int, AtLeast(1)] | None = None, *, real: bool = False
) -> StepProfile:
    """Trace the step with nothing offloaded.

    Args:
        sub_batch: samples that go through at once; by default the whole batch. Of several sub-batches two are run:
            the first finds no gradients, every other one adds to them.
        real: run on copies of the model and the batch instead of fake tensors, which needs memory for them. With one
            or two samples that is little; other sizes follow from two such profiles.

    Raises:
        ValueReadError: the step reads a tensor's value; the message names the layer. ``real=True`` can follow it.
    """
    return replay(step, OffloadPlan(sub_batch or step.samples), real=real)


@checked
def replay(
    step: TrainingStep,
    plan: OffloadPlan,
    *,
    in_flight_bytes: Annotated[int, AtLeast(0)] = 0,
    real: bool = False,
    compare: bool = True,
) -> StepProfile:
    """Trace the step under a plan; see :func:`profile_step`.

    Args:
        plan: the sub-batch size and what is offloaded.
        in_flight_bytes: as for :class:`OffloadSavedTensors`.
        real: see :func:`profile_step`.
        compare: refuse a plan for another number of saved storages.

    Raises:
        ValueReadError: the step reads a tensor's value.
        PlanMismatch: the plan is for another number of saved storages.
    """
    return DryRun(step, real=real).run(plan, in_flight_bytes=in_flight_bytes, compare=compare, as_cut=True)
