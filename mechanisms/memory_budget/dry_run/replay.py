"""Dry runs of a training step: what it needs, plain or under a plan, without using memory or touching the model.

    step = TrainingStep(model, (images, labels), 256, loss=lambda batch: criterion(model(batch[0]), batch[1]), ...)
    profile = profile_step(step)                            # fake tensors: forward, loss, backward, update
    profile.peak_bytes, profile.resident_bytes, profile.saved
    replay(step, OffloadPlan.parse("sub-batch 32, prefetch 1, offload 0-9 of 61")).peak_bytes

The step runs through the same :class:`OffloadSavedTensors` as in training, with fake tensors and a host that keeps
nothing, so a replay's peak is what the tensors of the real step will hold, to the byte.
"""

from __future__ import annotations

from typing import Annotated

from retime.foundations.arguments import AtLeast, checked
from retime.mechanisms.memory_budget.dry_run.profile import StepProfile
from retime.mechanisms.memory_budget.dry_run.run import DryRun
from retime.mechanisms.memory_budget.dry_run.training_step import TrainingStep
from retime.schedules.budget import MOST_SAVED, OffloadPlan

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
        step: what to run.
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
        step: what to run.
        plan: the sub-batch size and what is offloaded.
        in_flight_bytes: as for :class:`OffloadSavedTensors`.
        real: see :func:`profile_step`.
        compare: refuse a plan for another number of saved storages.

    Raises:
        ValueReadError: the step reads a tensor's value.
        PlanMismatch: the plan is for another number of saved storages.
    """
    return DryRun(step, real=real).run(plan, in_flight_bytes=in_flight_bytes, compare=compare, as_cut=True)
