"""Dry runs of a training step: what it needs, plain or under a plan, without using memory or touching the model.

    step = TrainingStep(model, (images, labels), 256, loss=lambda batch: criterion(model(batch[0]), batch[1]), ...)
    profile = profile_step(step)                            # fake tensors: forward, loss, backward, update
    profile.peak_bytes, profile.resident_bytes, profile.saved
    replay(step, OffloadPlan.parse("sub-batch 32, prefetch 1, offload 0-9 of 61")).peak_bytes

The step runs through the same :class:`OffloadSavedTensors` as in training, with fake tensors and a host that keeps
nothing, so a replay's peak is what the tensors of the real step will hold, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from retime.mechanisms.memory.host_memory import HostMemory
from retime.mechanisms.memory.host_null import HostNull
from retime.mechanisms.memory.offload import OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory.profile import StepProfile
from retime.mechanisms.memory.stand_ins import Replacement, copies, fake, stand_in_optimizer, stand_ins
from retime.mechanisms.memory.storages import tensors_in
from retime.mechanisms.memory.trace import Tracer, ValueReadError
from retime.schedules.memory import BlockKind, OffloadPlan, Phase

_WITHOUT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


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
        samples: how many samples it has.
        loss: runs the forward pass on a batch or a part of it and returns the scalar to differentiate. It reads
            parameters from ``module`` at each call.
        optimizers: run at the end, each once.
        split: takes a part out of a batch.
        gradients: what the gradients of the step before do. ``"freed"``: they are gone when the step begins;
            ``"freed after forward"``: gone after the first forward pass, as under Lightning's automatic optimization;
            ``"kept"``: they are zeroed in place, or were accumulated before.
    """

    module: nn.Module
    batch: Any
    samples: int
    loss: Callable[[Any], Tensor]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    split: Callable[[Any, int, int], Any] = take
    gradients: Literal["freed", "freed after forward", "kept"] = "freed"

    def of_size(self, samples: int) -> TrainingStep:
        """The same step on the first ``samples`` of the batch, and on nothing else."""
        return replace(self, batch=self.split(self.batch, 0, samples), samples=samples)


def profile_step(step: TrainingStep, sub_batch: int | None = None, *, real: bool = False) -> StepProfile:
    """Trace the step with nothing offloaded.

    Args:
        step: what to run.
        sub_batch: samples that go through at once; by default the whole batch. Of several sub-batches two are run:
            the first finds no gradients, every other one adds to them.
        real: run on copies of the model and the batch instead of fake tensors, which needs memory for them. With one
            or two samples that is little; other sizes follow from two such profiles.

    Raises:
        ValueReadError: the step reads a tensor's value; the message names the layer. ``real=True`` can follow it.
    """
    return replay(step, OffloadPlan(sub_batch or step.samples), real=real)


def replay(
    step: TrainingStep, plan: OffloadPlan, *, in_flight_bytes: int = 0, real: bool = False, compare: bool = True
) -> StepProfile:
    """Trace the step under a plan; see :func:`profile_step`.

    Args:
        step: what to run.
        plan: the sub-batch size and what is offloaded.
        in_flight_bytes: as for :class:`OffloadSavedTensors`.
        real: see :func:`profile_step`.
        compare: refuse a plan for another number of saved storages.

    Raises:
        ValueReadError: the step reads a tensor's value.
        PlanMismatch: the plan is for another number of saved storages.
    """
    with _stage(step, real) as (batch, optimizers, mode):
        tracer = Tracer(step.module)
        with mode:
            _prepare(step, batch, optimizers, tracer)
            try:
                with tracer.watch(), tracer:
                    _run(step, plan, batch, optimizers, tracer, in_flight_bytes, real, compare)
            except _WITHOUT_VALUES as error:
                raise ValueReadError(
                    f"an operation of {tracer.trace.operations[-1].layer if tracer.trace.operations else 'the model'} "
                    f"cannot be run dry, because what it makes depends on values ({error}): profile with real=True"
                ) from error
        return StepProfile(plan, step.samples, tracer.trace)


@contextmanager
def _stage(step: TrainingStep, real: bool) -> Iterator[tuple[Any, list[torch.optim.Optimizer], Any]]:
    """Stand-ins for everything that the step changes."""
    mode = nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    replacement: Replacement = copies() if real else fake(mode)  # type: ignore[arg-type]
    with stand_ins(step.module, replacement), torch.random.fork_rng(devices=[]):
        batch = replacement.tree(step.batch)
        yield batch, [stand_in_optimizer(optimizer, replacement) for optimizer in step.optimizers], mode


def _prepare(step: TrainingStep, batch: Any, optimizers: Sequence[torch.optim.Optimizer], tracer: Tracer) -> None:
    """What is there before the step: parameters, the batch, optimizer states of earlier steps, perhaps gradients."""
    parameters = list(step.module.parameters())
    tracer.add([parameters, list(step.module.buffers())], BlockKind.WEIGHT)
    tracer.add(batch, BlockKind.INPUT)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with torch.no_grad(), _AnyValue():
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:
            _make_states(optimizer)
    if step.gradients == "freed":
        for parameter in trained:
            parameter.grad = None
    for optimizer in optimizers:
        tracer.add([list(state.values()) for state in optimizer.state.values()], BlockKind.STATE)
    tracer.add([parameter.grad for parameter in trained], BlockKind.WEIGHT_GRADIENT)


def _no_matter(mismatch: PlanMismatch) -> None:
    pass


class _AnyValue(TorchDispatchMode):
    """Makes up the values that fake tensors do not have: a step count, say."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """States appear in the first update; a step in the middle of training finds them there."""
    if not any(optimizer.state.values()):
        optimizer.step()


def _run(
    step: TrainingStep,
    plan: OffloadPlan,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    tracer: Tracer,
    in_flight_bytes: int,
    real: bool,
    compare: bool,
) -> None:
    module = step.module
    host = HostMemory("cpu") if real else HostNull()
    fixed = [*module.parameters(), *module.buffers(), *tensors_in(batch)]
    offload = OffloadSavedTensors(plan, host, in_flight_bytes=in_flight_bytes, observer=tracer)
    if not compare:
        offload.on_mismatch = _no_matter
    starts = range(0, step.samples, plan.sub_batch)[:2]  # all but the first are alike
    for first in starts:
        part = step.split(batch, first, min(first + plan.sub_batch, step.samples)) if len(starts) > 1 else batch
        tracer.add(part, BlockKind.INPUT)
        tracer.phase = Phase.FORWARD
        tracer.begin_pass()
        offload.keep = [*fixed, *tensors_in(part)]
        with offload:
            loss = step.loss(part)
        offload.keep = ()
        if first == 0 and step.gradients == "freed after forward":
            for parameter in module.parameters():
                parameter.grad = None
        tracer.phase = Phase.BACKWARD
        loss.backward()
        del loss, part
        for parameter in module.parameters():
            if parameter.grad is not None:
                tracer.mark(parameter.grad, BlockKind.WEIGHT_GRADIENT)
    tracer.phase = Phase.UPDATE
    for optimizer in optimizers:
        optimizer.step()
