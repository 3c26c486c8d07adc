"""One traced run of a step under a plan: what is there before, forward and backward passes, the update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retime.foundations.parts import loss_of, part_lengths
from retime.foundations.preserve_state import DryMode, ValueReadError, fake
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    without_dispatch_modes,
)
from retime.mechanisms.memory_budget.dry_run.gradients import drop_gradients
from retime.mechanisms.memory_budget.dry_run.optimizers import StandInOptimizers
from retime.mechanisms.memory_budget.dry_run.outputs import KeptOutputs
from retime.mechanisms.memory_budget.dry_run.tracer import Tracer
from retime.mechanisms.memory_budget.dry_run.training_step import TrainingStep
from retime.mechanisms.memory_budget.host import HostTier
from retime.mechanisms.memory_budget.offload import OffloadSavedTensors, PlanMismatch
from retime.schedules.budget import BlockKind, OffloadPlan, Phase

_WITHOUT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class TracedStep:
    """Runs a step, on stand-ins that are in their places, under a tracer.

    Args:
        step: what to run.
        batch: its stand-in.
        optimizers: those of the step, over stand-ins.
        tracer: counts storages and operations.
        host: where storages go.
        mode: makes fake tensors; None where the run is real.
    """

    def __init__(
        self,
        step: TrainingStep,
        batch: Any,
        optimizers: StandInOptimizers,
        tracer: Tracer,
        host: HostTier,
        mode: DryMode | None,
    ) -> None:
        self._step, self._batch, self._optimizers = step, batch, optimizers
        self._tracer, self._host, self._mode = tracer, host, mode

    def run(self, plan: OffloadPlan, in_flight_bytes: int, *, compare: bool, update: bool, as_cut: bool) -> None:
        """Trace the step; arguments as for :meth:`~retime.mechanisms.memory_budget.dry_run.run.DryRun.run`.

        Raises:
            ValueReadError: the step reads a tensor's value.
            PlanMismatch: the plan is for another number of saved storages.
        """
        tracer = self._tracer
        outliving = self._lay_out(plan.sub_batch < self._step.samples)
        try:
            with tracer.watch(), tracer:
                outliving += self._forward_backward(plan, in_flight_bytes, compare, as_cut)
                if update:
                    tracer.begin(Phase.UPDATE)
                    self._optimizers.update()
        except _WITHOUT_VALUES as error:
            operations = tracer.trace.operations
            raise ValueReadError(
                f"an operation of {operations[-1].layer if operations else 'the model'} cannot be run dry, because "
                f"what it makes depends on values ({error})"
            ) from error
        finally:
            tracer.finish()
            del outliving
            drop_gradients(self._optimizers.trained)

    def _lay_out(self, parts: bool) -> list[Any]:
        """Count what is there before the step: parameters, the batch, optimizer states, perhaps gradients.

        Args:
            parts: the batch is cut into sub-batches.

        Returns:
            What of that nobody else holds.
        """
        module, tracer = self._step.module, self._tracer
        tracer.add(list(module.parameters()), BlockKind.WEIGHT)
        tracer.trace.parameters = len(tracer.trace.storages)
        tracer.add(list(module.buffers()), BlockKind.WEIGHT)
        tracer.add(self._batch, BlockKind.INPUT)
        for states in self._optimizers.states:
            tracer.add(states, BlockKind.STATE)
        buckets: list[Any] = []
        if self._step.buckets == "beside" or (self._step.buckets and parts):
            buckets = [torch.empty_like(parameter, device="meta") for parameter in self._optimizers.trained]
        if self._step.reduction_bytes:
            buckets.append(torch.empty(self._step.reduction_bytes, dtype=torch.uint8, device="meta"))
        tracer.add(buckets, BlockKind.WEIGHT_GRADIENT)
        there = self._optimizers.lasting if self._gradients(parts) == "freed" else self._optimizers.trained
        for parameter in there:
            parameter.grad = torch.zeros_like(parameter)
        tracer.add([parameter.grad for parameter in there], BlockKind.WEIGHT_GRADIENT)
        return buckets

    def _gradients(self, parts: bool) -> str:
        """Gradients that are buckets are there at all times."""
        return "kept" if self._step.buckets == "gradients" and not parts else self._step.gradients

    def _forward_backward(self, plan: OffloadPlan, in_flight_bytes: int, compare: bool, as_cut: bool) -> list[Any]:
        """Run them for the first two sub-batches, or for the whole batch.

        Returns:
            What training holds to the step's end of what the step returned.
        """
        step, module, tracer = self._step, self._step.module, self._tracer
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
            tracer.begin(Phase.FORWARD)
            tracer.begin_pass()
            offload.keep = [*fixed, *tensors_in(part)]
            with offload:
                output = step.loss(part)
            offload.keep = ()
            part_outputs = KeptOutputs(tracer, output, size, count)
            outputs.append(part_outputs.apart if first else output)  # Lightning holds a batch's first as it is
            if first == 0:
                outputs += part_outputs.others(step.whole or step.samples)
                if self._gradients(count > 1) == "freed after forward":
                    lasting = {id(parameter) for parameter in self._optimizers.lasting}
                    drop_gradients(
                        [parameter for parameter in self._optimizers.trained if id(parameter) not in lasting]
                    )
            loss = loss_in(output)
            del output, part_outputs
            tracer.begin(Phase.BACKWARD)
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
            return self._step.split(self._batch, first, last)
        except (ValueReadError, *_WITHOUT_VALUES):
            if self._mode is None:
                raise
            with without_dispatch_modes():
                part = self._step.split(self._step.batch, first, last)
            return fake(self._mode).batch(part)


def loss_in(output: Any) -> Tensor:
    """The scalar to differentiate; one that is returned as such needs no operation."""
    return output if isinstance(output, Tensor) and output.dim() == 0 else loss_of(output)


def ignore_mismatch(mismatch: PlanMismatch) -> None:
    """A plan that is for another number of saved storages is followed as far as it goes."""
