"""Makes the plan of one batch inside a budget: dry runs, probe, calibration, search, trial (moDNN, section 4.2).

A dry run calls the user's step more often than training does. Where that shows - an environment is stepped, a replay
buffer grows - a budget that is roomy enough needs none: the first step of each shape is trained as it is, and what its
forward pass makes is added up. If a multiple of that fits, the step fits whatever its backward pass does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.lazy_updates import is_compiled
from retime.foundations.messages import parse_bytes, warn_difference
from retime.foundations.parts import BatchNormChoice, Certificate, Split, batch_statistics_layers, dry_part, split_batch
from retime.foundations.patching import replaced_attributes
from retime.foundations.preserve_state import (
    ExternalTensors,
    SavedState,
    nothing_compiled,
    preserve_state,
    reachable_tensors,
)
from retime.foundations.storages import strided_bytes
from retime.mechanisms.memory_budget.costs import calibrate, least_costs
from retime.mechanisms.memory_budget.dry_run import (
    AllocatedBytes,
    Buckets,
    Gradients,
    StepProfile,
    TooMuchAllocated,
    TrainingStep,
    everything,
)
from retime.mechanisms.memory_budget.offload import HostTier, PlanMismatch
from retime.mechanisms.memory_budget.report import OnShapeChange, PlannedShape
from retime.mechanisms.memory_budget.search import MOST_TRIALS, PlanChoice, PlanTrial, examined, part_sizes, search_plan
from retime.mechanisms.memory_budget.separability import certify, check_sizes
from retime.mechanisms.memory_budget.step_memory import StepMemory
from retime.schedules.budget import OffloadPlan

# How far planning is: which stage of how many.

PROBING = "finding out whether sub-batches give the same gradients"
_LEAST = "measuring on a few samples what the step needs at least"
_MEASURING = "measuring on a few samples how long the step and copies to the host take"
_COUNTING = (
    "deterministic algorithms are on, so the plan is chosen by counted bytes and operations and not by measured times: "
    "every run chooses the same"
)
_SEARCHING = "searching among plans by dry runs"


class PlanningStages:
    """Tells stages as they begin, after the first one, a dry run.

    How long one takes is not said: it depends on the step's Python code, the disk and what else the machine does.

    Args:
        say: is told a line a stage.
        probed: whether gradients are probed.
        timed: plans are chosen by measured times.
    """

    def __init__(self, say: Callable[[str], None], *, probed: bool, timed: bool) -> None:
        self._say = say
        self._trial = 0
        self._number, self._last = 1, 4 + probed + (MOST_TRIALS if timed else 0)

    def begin(self, text: str) -> None:
        """Tell what is done next."""
        self._number += 1
        self._say(f"{text} (stage {self._number} of at most {self._last})")

    def trial(self, plan: OffloadPlan) -> None:
        """Tell that the next plan is tried out."""
        self._trial += 1
        self.begin(f"trying plan {self._trial}: {plan}")


_SPACIOUS = 3
"""A plain step whose tensors fit into the budget so many times is not looked at any closer.

oneDNN's LSTM saves a work space that no dry run sees, as large as all the rest.
"""

_PROBED = (3, 5)
"""The fewest and the most samples that are probed at once."""

_ONLY_OFFLOAD = re.compile(r"[;,.](?: or)? offload only(?:, or )?", re.IGNORECASE)
"""Advice in a certificate that is none where offloading alone does not keep the budget."""

Step = Callable[[Any], Any]


def _say_nothing(text: str) -> None:
    pass


@checked
@dataclass(frozen=True)
class BudgetOptions:
    """Choices for a budget, checked; :class:`~retime.mechanisms.memory_budget.BudgetedStep` says what each means."""

    batchnorm: BatchNormChoice = "offload"
    on_shape_change: OnShapeChange = "replan"
    split: Split = split_batch
    loss_weight: Callable[[Any], Any] | None = None
    dry_run: DryRuns = "auto"
    plan: str | os.PathLike[str] | None = None
    gradients: Gradients = "freed"
    buckets: Buckets = ""
    reduction_bytes: int | str = 0
    hidden_bytes: Annotated[int, AtLeast(0)] = 0
    may_stop: bool = True
    whole_because: str = ""
    sub_batches: bool = True
    say: Callable[[str], None] = _say_nothing
    make_plan: MakePlan | None = None


MakePlan = Callable[["StepPlanner", Step, Any, int], PlannedShape]
"""Makes the plan of a step for a batch of so many samples, as :meth:`StepPlanner.make` does."""


class StepPlanner:
    """Plans for the steps of one model.

    Args:
        model, optimizers, budget_bytes, host, options: as for
            :class:`~retime.mechanisms.memory_budget.BudgetedStep`.

    Attributes:
        gradients: whether those of steps before are there; may be set between two batches.
        whole_because: why batches must not be split, if the caller knows a reason.
        planning: the step that runs at the moment is only tried out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        budget_bytes: int,
        host: HostTier,
        options: BudgetOptions,
    ) -> None:
        self.model, self.optimizers, self.budget_bytes, self.host = model, optimizers, budget_bytes, host
        self.options, self.gradients, self.whole_because = options, options.gradients, options.whole_because
        self.reduction_bytes = parse_bytes("reduction_bytes", options.reduction_bytes, least=0)
        self.planning = False

    def trying_out(self) -> AbstractContextManager[None]:
        """Around everything that calls a step without its result being wanted."""
        return replaced_attributes(self, planning=True)

    def make(self, step: Step, batch: Any, samples: int) -> PlannedShape:
        """Choose, of the plans that fit and are nearly the fastest, the one that moves least; see :func:`search_plan`.

        Raises:
            BudgetError: the budget is below the floor.
        """
        dry, saved = self._dry(step, batch, samples), preserve_state(self.model, step)
        with saved:
            memory = StepMemory(dry, (samples,))
            plain = memory.plain
            if plain is not None and _SPACIOUS * plain.peak_bytes <= self.budget_bytes:
                choice = search_plan(dry, self.budget_bytes, memory=memory)
                return PlannedShape(samples, choice, note=_note(memory))
        probed = self._probe_samples(plain, samples)
        probes = self.options.sub_batches and samples > 1 and not self.whole_because
        timed = not torch.are_deterministic_algorithms_enabled()
        stages = PlanningStages(self.options.say, probed=probes, timed=timed)
        certificate = None
        if self.options.sub_batches and samples > 1:
            certificate = self.certify(step, batch, samples=probed, plain=plain, say=stages.begin)
        separable = certificate is not None and certificate.separable
        with saved:
            trial = PlanTrial(dry, self.host, plain, self.budget_bytes)
            # with ghost statistics 3: then equal parts have 2, and with them a variance
            smallest = 3 if self.options.batchnorm == "ghost" else 1
            sizes = part_sizes(samples, smallest) if separable else (samples,)
            memory = StepMemory(dry, sizes, check=True, earlier=memory)
            stages.begin(_LEAST)
            least = least_costs(dry, self.host, memory.sub_batches[0], plain)
            memory.find_floor_by(least, None if plain is None else _SPACIOUS * plain.peak_bytes)
            memory.require(self.budget_bytes, self._fewer(certificate))
            stages.begin(_MEASURING if timed else _COUNTING)
            memory.costs = calibrate(dry, self.host, plain=plain, budget_bytes=self.budget_bytes, timed=timed)
            stages.begin(_SEARCHING)

            def tried_ms(choice: PlanChoice) -> float | None:
                stages.trial(choice.plan)
                return trial.step_ms(choice)

            choice = search_plan(dry, self.budget_bytes, memory=memory, trial=tried_ms if timed else None)
        kept = certificate if choice.plan.sub_batch < samples else None
        _tell_of_draws(kept)
        return PlannedShape(samples, choice, kept, _note(memory, trial.note))

    def of_saved(self, shape: PlannedShape, step: Step, batch: Any, samples: int) -> PlannedShape | None:
        """An earlier run's plan, if its step needs no more than it did then, and no more than the budget.

        What tensors need and what moves are found out anew, and sub-batches are probed anew. What operations need
        beside tensors was measured in that run, and is added.
        """
        choice = shape.choice
        with preserve_state(self.model, step):
            memory = StepMemory(self._dry(step, batch, samples), (samples, choice.plan.sub_batch))
            plain = memory.plain
            if plain is None:
                return None
            try:
                now = examined(memory, choice)
            except PlanMismatch:
                return None
        fits = now.peak_bytes + now.spare_bytes <= self.budget_bytes and now.tensor_bytes <= choice.tensor_bytes
        if not fits or samples == 1 < shape.samples:
            return None
        certificate = None
        if choice.plan.sub_batch < shape.samples:
            certificate = self.certify(step, batch, samples=self._probe_samples(plain, samples), plain=plain)
            if not certificate.separable:
                return None
            _tell_of_draws(certificate)
        return replace(shape, choice=now, certificate=certificate)

    def certify(
        self,
        step: Step,
        batch: Any,
        among: Certificate | None = None,
        samples: int = _PROBED[1],
        plain: StepProfile | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Certificate:
        """Probe with so many samples whether sub-batches give the same gradients; ``say`` tells that it runs."""
        if self.whole_because:
            return Certificate(None, self.whole_because)
        (say or self.options.say)(PROBING)
        with self.trying_out(), preserve_state(self.model, step):
            return certify(
                step,
                batch,
                self.model,
                split=self.options.split,
                loss_weight=self.options.loss_weight,
                ghost=self.options.batchnorm == "ghost",
                among=among,
                samples=samples,
                read_only=plain is not None and not plain.trace.writes_parameters,
            )

    def check_sizes(self, step: Step, batch: Any, certificate: Certificate, sizes: Collection[int]) -> Certificate:
        """The same certificate, if batches of these sizes do what the probed samples do."""
        with self.trying_out(), preserve_state(self.model, step):
            return check_sizes(
                step,
                batch,
                self.model,
                certificate,
                sizes,
                split=self.options.split,
                given=self.options.loss_weight is not None,
                ghost=self.options.batchnorm == "ghost",
            )

    def made_for(self) -> dict[str, Any]:
        """Conditions that plans depend on beside the batch and the model's flags, in plain types."""
        trained = strided_bytes(parameter for parameter in self.model.parameters() if parameter.requires_grad)
        fixed = strided_bytes((*self.model.parameters(), *self.model.buffers())) - trained
        return {
            "budget_bytes": self.budget_bytes,
            "batchnorm": self.options.batchnorm,
            "buckets": self.options.buckets,
            "reduction_bytes": self.reduction_bytes,
            "sub_batches": self.options.sub_batches,
            "model": f"{type(self.model).__name__}: {trained} bytes trained, {fixed} fixed",
            "optimizers": ", ".join(type(one).__name__ for one in self.optimizers),
        }

    def _dry(self, step: Step, batch: Any, samples: int) -> TrainingStep:
        return TrainingStep(
            self.model,
            batch,
            samples,
            loss=lambda part: step(copy(part) if isinstance(part, MutableMapping) else part),  # it may pop its labels
            optimizers=self.optimizers,
            split=lambda whole, first, last: (
                whole if samples == 1 else dry_part(whole, first, last, self.options.split)
            ),
            gradients=self.gradients,
            buckets=self.options.buckets,
            reduction_bytes=self.reduction_bytes,
        )

    def _probe_samples(self, plain: StepProfile | None, samples: int) -> int:
        """Number of samples that the probe may run at once inside the budget."""
        if plain is None:
            return _PROBED[1]
        each = max(1, (plain.peak_bytes - plain.resident_bytes) // samples)
        room = self.budget_bytes - plain.resident_bytes
        return max(_PROBED[0], min(_PROBED[1], room // each))

    def _fewer(self, certificate: Certificate | None) -> str:
        """Reason why fewer samples than a batch has cannot run at once, and what can be done; empty if none."""
        if not self.options.sub_batches:
            return "Batches are only offloaded here: run(), which may split them, or a smaller batch would help"
        if certificate is None or certificate.separable:
            return ""
        problem, *advice = _ONLY_OFFLOAD.split(certificate.reason, maxsplit=1)
        because = f"Sub-batches would lower it, but {problem}"
        if not certificate.layers or list(certificate.layers) != batch_statistics_layers(self.model):
            return "; ".join(filter(None, (because, *advice))) + ". A smaller batch would help"
        return f"{because}; choose batchnorm='ghost', or a smaller batch"


def _tell_of_draws(certificate: Certificate | None) -> None:
    if certificate is not None and certificate.drawn:
        warn_difference(f"under a memory budget {certificate.drawn}")


def _note(memory: StepMemory, *more: str) -> str:
    unknown = [f"what {name} keeps for itself is not counted" for name in memory.not_run]
    return "; ".join(filter(None, (memory.note, *unknown, *more)))


# The first step of each shape, trained for real while it is counted, so that nothing has to be tried out before it.

DryRuns = Literal["auto", "off"]
COUNTED = "counted while the first step was trained, without a dry run"
"""The note of such plans."""

_TIMES_MADE = 3
"""What a forward pass makes counts so often: as what it saves, as gradients of that, and as what no count sees.

Nothing of it counts as freed, so it is more than is ever saved, also where a backward pass computes segments again.
oneDNN's LSTM saves a work space that no count sees, as large as all the rest.
"""

_ROOMY = 16
"""A step that nothing is known of is trained without a plan where the budget is so many times what is there anyway."""

_GRADIENTS, _STATES = 2, 4
"""Sizes of the trained parameters: gradients, and as much for the update; optimizer states (AMSGrad's are 3)."""


class FirstSteps:
    """Decides which first steps are trained without a plan, and counts them."""

    def __init__(self, planner: StepPlanner) -> None:
        self._model, self._optimizers = planner.model, planner.optimizers
        self._budget_bytes, self._options = planner.budget_bytes, planner.options
        self._too_large: set[Any] = set()

    def begin(self, key: Any, batch: Any, samples: int, may_stop: bool) -> PlannedShape | None:
        """Plan that the first step of a shape is to run under; None: it has to be planned for.

        With ``dry_run="off"`` everything is offloaded, which is the least that a whole batch needs.

        Args:
            may_stop: the step can be stopped in its forward pass, and run again.
        """
        plan = OffloadPlan(samples)
        if self._options.dry_run == "off":
            plan = everything(samples)
        elif not (
            may_stop
            and key not in self._too_large
            and not any(map(is_lazy, self._model.parameters()))
            and not any(map(is_compiled, self._model.modules()))  # what these make cannot be counted
            and _ROOMY * self._standing_bytes(batch) <= self._budget_bytes
        ):
            return None
        return PlannedShape(samples, PlanChoice(plan))

    @contextmanager
    def counted(self, key: Any, batch: Any, samples: int) -> Iterator[list[PlannedShape]]:
        """Around the forward pass; afterwards the list holds what is now known of the shape: nothing, or all.

        Raises:
            TooMuchAllocated: it may not fit. The model, the batch and all other tensors are as they were.
        """
        standing = self._standing_bytes(batch)
        shapes: list[PlannedShape] = []
        tensors = reachable_tensors(self._model, batch)
        undo = SavedState(self._model, tensors=tensors) if self._options.dry_run == "auto" else None
        outside = ExternalTensors(tensors, gradients=False)
        del tensors  # a step may replace some, which then are to be free
        allocated = AllocatedBytes((self._budget_bytes - 2 * standing) // _TIMES_MADE if undo else None)
        try:
            with allocated, outside.watched(bindings=nothing_compiled()) if undo else nullcontext():
                yield shapes
        except TooMuchAllocated:
            assert undo is not None
            undo.put_back()
            outside.put_back()
            self._too_large.add(key)
            self._options.say(
                "the first step was stopped in its forward pass, as it may not fit without a plan, and runs again: its "
                "effects outside of the model, the batch and other tensors, such as lines in a file, are there twice"
            )
            raise
        peak = standing + _TIMES_MADE * allocated.bytes
        if peak > self._budget_bytes:
            return
        choice = PlanChoice(OffloadPlan(samples), peak_bytes=peak, tensor_bytes=peak)
        shapes.append(PlannedShape(samples, choice, note=COUNTED, first_step_bytes=0))

    def _standing_bytes(self, batch: Any) -> int:
        """Bytes held whatever the step does; nothing is run to find out, so states count with the most there are."""
        parameters = list(self._model.parameters())
        trained = strided_bytes(parameter for parameter in parameters if parameter.requires_grad)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        history = max((group.get("history_size", 0) for group in groups), default=0)  # LBFGS keeps two of each
        return strided_bytes(reachable_tensors(self._model, batch)) + (_GRADIENTS + _STATES + 2 * history) * trained
