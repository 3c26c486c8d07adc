"""Candidates for a plan run for real, a sub-batch each, because predicted times miss what caches and disks do."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from retime.foundations.cpu_pool import within
from retime.foundations.storages import strided_bytes
from retime.mechanisms.memory_budget.dry_run import DryRun, StepProfile, TrainingStep
from retime.mechanisms.memory_budget.host import HostTier
from retime.mechanisms.memory_budget.planning.choice import PlanChoice
from retime.schedules.budget import BlockKind

_REPEATS = 3
_ENOUGH_S = 1.0


class PlanTrial:
    """Times candidates on the model's own parameters, without changing anything.

    Args:
        step: what to run. Its state, and the random generators, stay as they are.
        host: where plans offload to.
        plain: a dry run of the whole batch; None where there is none.
        budget_bytes: what the step may need, with parameters and the batch.

    Attributes:
        note: why a plan was not tried out that should have been; empty if all were.
    """

    def __init__(self, step: TrainingStep, host: HostTier, plain: StepProfile | None, budget_bytes: int) -> None:
        self._step, self._host, self._budget_bytes = step, host, budget_bytes
        self.note = ""
        self._absent_bytes = step.reduction_bytes + (0 if plain is None else _absent_bytes(step, plain))
        # A step that writes into what it is given needs copies, for which there may be no room.
        self._possible = plain is not None and not plain.trace.writes_parameters and not plain.trace.writes_batch

    def step_ms(self, choice: PlanChoice) -> float | None:
        """Milliseconds of all forward and backward passes of a step under a plan; None where it cannot be tried out."""
        if not self._possible:
            return None
        size = choice.plan.sub_batch
        part = replace(self._step.of_size(size), optimizers=(), gradients="freed", buckets="", reduction_bytes=0)
        run = DryRun(part, real=True, host=self._host, in_place=True, own_batch=False)
        times: list[float] = []
        try:
            with within(self._step.given(), choice.reserved_bytes(self._budget_bytes) - self._absent_bytes):
                run.untraced(choice.plan, in_flight_bytes=choice.in_flight_bytes)  # libraries generate code at first
                while len(times) < _REPEATS and sum(times) < _ENOUGH_S:
                    begin = time.perf_counter()
                    run.untraced(choice.plan, in_flight_bytes=choice.in_flight_bytes)
                    times.append(time.perf_counter() - begin)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                self.note = "chosen by predicted times: there was no room to try plans out"
                return None  # the first time needs what libraries load beside the plan
            raise
        return 1e3 * min(times) * self._step.samples / size


def _absent_bytes(step: TrainingStep, plain: StepProfile) -> int:
    """What training holds and a trial does not: optimizer states and buckets."""
    states = sum(storage.nbytes for storage in plain.trace.storages if storage.kind is BlockKind.STATE)
    trained = (parameter for parameter in step.module.parameters() if parameter.requires_grad)
    return states + (strided_bytes(trained) if step.buckets else 0)
