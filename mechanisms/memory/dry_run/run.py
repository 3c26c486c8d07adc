"""Runs of one training step on stand-ins, with fake tensors or with copies: traced, or only measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retime.mechanisms.measure import MemoryProbe
from retime.mechanisms.memory.batches import loss_of, part_lengths
from retime.mechanisms.memory.dry_run.outputs import HeldOutputs
from retime.mechanisms.memory.dry_run.profile import StepProfile
from retime.mechanisms.memory.dry_run.tracer import Meter, Tracer
from retime.mechanisms.memory.dry_run.training_step import TrainingStep
from retime.mechanisms.memory.host import HostMemory, HostNull, HostTier
from retime.mechanisms.memory.offload import OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory.sandbox import (
    DryMode,
    Outside,
    ValueReadError,
    aliases,
    copies,
    fake,
    stand_in_optimizer,
    stand_ins,
)
from retime.mechanisms.storages import tensors_in
from retime.mechanisms.torch_private import (
    LOCAL_SCALAR_DENSE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    without_dispatch_modes,
)
from retime.schedules.budget import BlockKind, OffloadPlan, Phase

_WITHOUT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class DryRun:
    """Stand-ins for all that a step changes, made once for many runs.

    Args:
        step: what to run.
        real: stand-ins are copies; see :func:`profile_step`.
        host: where real runs offload to; by default plain CPU memory.
        in_place: real runs read the model's own parameters instead of copies. For steps that do not write into them.
        own_batch: real runs get a copy of the batch. False for steps that do not write into it.
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
        self.not_run: list[str] = []
        self._offload: OffloadSavedTensors | None = None
        self._host = host or (HostMemory("cpu") if real else HostNull())
        self._mode: DryMode | None = None
        self._replacement = aliases() if in_place else copies()
        if not real:
            self._mode = DryMode()
            self._replacement = fake(self._mode)
        self._batch = self._replacement.batch(step.batch) if own_batch or not real else step.batch
        with self._staged():
            self._optimizers = [stand_in_optimizer(optimizer, self._replacement) for optimizer in step.optimizers]
            self._trained = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
            self._lasting = self._without_optimizer()
            self._outside, self._watched = Outside(self._replacement.stand_ins), False
            with self._mode or nullcontext(), self._outside.put_back_after():
                self._complete()

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
        """
        tracer = Tracer(self.step.module, meter)
        with self._staged(), self._running():
            parts = plan.sub_batch < self.step.samples
            held = self._lay_out(tracer, parts)
            try:
                with tracer.watch(), tracer:
                    held += self._forward_backward(tracer, plan, in_flight_bytes, compare, as_cut)
                    if update:
                        tracer.phase = Phase.UPDATE
                        self._update()
            except _WITHOUT_VALUES as error:
                operations = tracer.trace.operations
                raise ValueReadError(
                    f"an operation of {operations[-1].layer if operations else 'the model'} cannot be run dry, because "
                    f"what it makes depends on values ({error})"
                ) from error
            finally:
                tracer.finish()
                del held
                self._free(self._trained)
        return StepProfile(plan, self.step.samples, tracer.trace)

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
            _loss_in(output).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if probe is not None:
                probe.stop()
            self._free(self._trained)

    def _offloading(self, plan: OffloadPlan, in_flight_bytes: int) -> OffloadSavedTensors:
        """The same for all runs under a plan, as in training: it does less once it knows what a pass saves."""
        known = self._offload
        if known is None or known.plan != plan or known.in_flight_bytes != in_flight_bytes:
            known = OffloadSavedTensors(plan, self._host, in_flight_bytes=in_flight_bytes, on_mismatch=_no_matter)
            self._offload = known
        return known

    @contextmanager
    def _staged(self) -> Iterator[None]:
        step, open_mode = self.step, self._mode.open() if self._mode else nullcontext()
        with open_mode, stand_ins(step.module, self._replacement, step.beside), torch.random.fork_rng(devices=[]):
            yield

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Of real runs only the first is watched: later ones, which may be timed, write into the same tensors."""
        with self._mode or nullcontext(), self._outside.put_back_after(watched=not self._watched):
            yield
        self._watched = self._mode is None

    def _complete(self) -> None:
        """States appear in a parameter's first update; a step in the middle of training finds them there.

        Once an optimizer has some, a parameter without is a new one (thawed, or of a later group), or one that gets no
        gradients. An additional pass tells, and which gradients that no optimizer frees there are.
        """
        fresh = [one for optimizer in self._optimizers for one in self._without_state(optimizer) if not optimizer.state]
        later = [one for optimizer in self._optimizers for one in self._without_state(optimizer) if optimizer.state]
        if later or self._lasting:
            reached = self._reached()
            later = [one for one in later if id(one) in reached]
            self._lasting = [one for one in self._lasting if id(one) in reached]
        if fresh or later:
            for parameter in (*fresh, *later):  # the others keep what they have: they are not updated
                parameter.grad = torch.zeros_like(parameter)
            with _AnyValue():  # type: ignore[no-untyped-call]
                self._update()
            self._free(self._trained)

    def _without_state(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        trained = {id(parameter) for parameter in self._trained}
        groups = (group["params"] for group in optimizer.param_groups)
        return [one for one in chain.from_iterable(groups) if id(one) in trained and not optimizer.state.get(one)]

    def _without_optimizer(self) -> list[nn.Parameter]:
        """Trained parameters whose gradients no ``zero_grad`` frees. Without any optimizer all are somebody else's."""
        groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
        known = {id(one) for one in chain.from_iterable(groups)}
        return [one for one in self._trained if id(one) not in known] if self._optimizers else []

    def _reached(self) -> set[int]:
        """Ids of the parameters that get gradients; of all trained ones where a step without values cannot tell."""
        try:
            _loss_in(self.step.loss(self._batch)).backward()  # type: ignore[no-untyped-call]
            return {id(one) for one in self._trained if one.grad is not None}
        except Exception:  # whatever the user's code says to tensors without values; the run itself will tell
            return {id(one) for one in self._trained}
        finally:
            self._free(self._trained)

    @staticmethod
    def _free(parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def _update(self) -> None:
        """Run the optimizers; one that cannot be run alone (it wants a closure, or sparse gradients) is left out."""
        for optimizer in list(self._optimizers):
            try:
                optimizer.step()
            except Exception:  # whatever an optimizer says to a step that is not in the middle of training
                self._optimizers.remove(optimizer)
                self.not_run.append(type(optimizer).__name__)

    def _lay_out(self, tracer: Tracer, parts: bool) -> list[Any]:
        """What is there before the step: parameters, the batch, optimizer states, perhaps gradients.

        Returns what nobody else holds.
        """
        module = self.step.module
        tracer.add(list(module.parameters()), BlockKind.WEIGHT)
        tracer.trace.parameters = len(tracer.trace.storages)
        tracer.add(list(module.buffers()), BlockKind.WEIGHT)
        tracer.add(self._batch, BlockKind.INPUT)
        for optimizer in self._optimizers:
            tracer.add([list(state.values()) for state in optimizer.state.values()], BlockKind.STATE)
        buckets: list[Any] = []
        if self.step.buckets == "beside" or (self.step.buckets and parts):
            buckets = [torch.empty_like(parameter, device="meta") for parameter in self._trained]
        if self.step.reduction_bytes:
            buckets.append(torch.empty(self.step.reduction_bytes, dtype=torch.uint8, device="meta"))
        tracer.add(buckets, BlockKind.WEIGHT_GRADIENT)
        there = self._lasting if self._gradients(parts) == "freed" else self._trained
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
        """Returns what training holds to the step's end of what it returned."""
        step, module = self.step, self.step.module
        fixed = [*module.parameters(), *module.buffers(), *tensors_in(self._batch)]
        offload = OffloadSavedTensors(plan, self._host, in_flight_bytes=in_flight_bytes, observer=tracer)
        if not compare:
            offload.on_mismatch = _no_matter
        count = -(-step.samples // plan.sub_batch)
        sizes = part_lengths(step.samples, count) if as_cut else [plan.sub_batch] * count
        first = 0
        held: list[Any] = []
        for size in sizes[:2]:  # all but the first find gradients, and none of them is larger than the second
            part = self._batch
            if count > 1:
                with tracer.inside():  # cutting is none of the step's operations
                    part = self._cut(first, min(first + size, step.samples))
                tracer.add(part, BlockKind.INPUT)
            tracer.phase = Phase.FORWARD
            tracer.begin_pass()
            offload.keep = [*fixed, *tensors_in(part)]
            with offload:
                output = step.loss(part)
            offload.keep = ()
            kept = HeldOutputs(tracer, output, size, count)
            held.append(kept.apart if first else output)  # Lightning holds a batch's first as it is
            if first == 0:
                held += kept.others(step.whole or step.samples)
                if self._gradients(count > 1) == "freed after forward":
                    lasting = {id(parameter) for parameter in self._lasting}
                    self._free([parameter for parameter in self._trained if id(parameter) not in lasting])
            loss = _loss_in(output)
            del output, kept
            tracer.phase = Phase.BACKWARD
            loss.backward()  # type: ignore[no-untyped-call]
            del loss, part
            for parameter in self._trained:
                if parameter.grad is not None:
                    tracer.mark(parameter.grad, BlockKind.WEIGHT_GRADIENT)
            first += size
        return held

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


def _loss_in(output: Any) -> Tensor:
    """The scalar to differentiate; one that is returned as such needs no operation."""
    return output if isinstance(output, Tensor) and output.dim() == 0 else loss_of(output)


def _no_matter(mismatch: PlanMismatch) -> None:
    pass


class _AnyValue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes up the values that fake tensors do not have: a step count, say."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is LOCAL_SCALAR_DENSE and isinstance(args[0], FakeTensor):
            return 0.5 if args[0].dtype.is_floating_point else 1  # no optimizer divides by 1 - 0.5
        return func(*args, **(kwargs or {}))
