"""Runs of one training step on stand-ins, with fake tensors or with copies: traced, or only measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from retime.foundations.measure import MemoryProbe
from retime.foundations.preserve_state import DryMode, Outside, aliases, copies, fake, stand_ins
from retime.foundations.storages import tensors_in
from retime.mechanisms.memory_budget.dry_run.gradients import drop_gradients
from retime.mechanisms.memory_budget.dry_run.optimizers import StandInOptimizers
from retime.mechanisms.memory_budget.dry_run.profile import StepProfile
from retime.mechanisms.memory_budget.dry_run.traced_step import TracedStep, ignore_mismatch, loss_in
from retime.mechanisms.memory_budget.dry_run.tracer import Meter, Tracer
from retime.mechanisms.memory_budget.dry_run.training_step import TrainingStep
from retime.mechanisms.memory_budget.host import HostMemory, HostNull, HostTier
from retime.mechanisms.memory_budget.offload import OffloadSavedTensors
from retime.schedules.budget import OffloadPlan


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
            self._outside, self._watched = Outside(self._replacement.stand_ins), False
            with self._mode or nullcontext(), self._outside.put_back_after():
                self._optimizers.complete(self._reached)

    @property
    def not_run(self) -> list[str]:
        """Classes of optimizers that cannot be run by themselves, so that their states are not known."""
        return self._optimizers.not_run

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
        traced = TracedStep(self.step, self._batch, self._optimizers, tracer, self._host, self._mode)
        with self._staged(), self._running():
            traced.run(plan, in_flight_bytes, compare=compare, update=update, as_cut=as_cut)
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
            loss_in(output).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if probe is not None:
                probe.stop()
            drop_gradients(self._optimizers.trained)

    def _offloading(self, plan: OffloadPlan, in_flight_bytes: int) -> OffloadSavedTensors:
        """The same for all runs under a plan, as in training: it does less once it knows what a pass saves."""
        known = self._offload
        if known is None or known.plan != plan or known.in_flight_bytes != in_flight_bytes:
            known = OffloadSavedTensors(plan, self._host, in_flight_bytes=in_flight_bytes, on_mismatch=ignore_mismatch)
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

    def _reached(self) -> set[int]:
        """Ids of the parameters that get gradients; of all trained ones where a step without values cannot tell."""
        try:
            loss_in(self.step.loss(self._batch)).backward()  # type: ignore[no-untyped-call]
            return {id(one) for one in self._optimizers.trained if one.grad is not None}
        except Exception:  # whatever the user's code says to tensors without values; the run itself will tell
            return {id(one) for one in self._optimizers.trained}
        finally:
            drop_gradients(self._optimizers.trained)
