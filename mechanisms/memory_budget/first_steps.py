"""The first step of each shape, trained for real while it is counted, so that nothing has to be tried out before it.

A dry run calls the user's step more often than training does. Where that shows - an environment is stepped, a replay
buffer grows - a budget that is roomy enough needs none: the first step is trained as it is, and what its forward pass
makes is added up. If a multiple of that fits, the step fits whatever its backward pass does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from torch.nn.parameter import is_lazy

from retime.foundations.lazy_updates import is_compiled
from retime.foundations.preserve_state import ExternalTensors, SavedState, nothing_compiled, reachable_tensors
from retime.foundations.storages import strided_bytes
from retime.mechanisms.memory_budget.dry_run import AllocatedBytes, TooMuchAllocated, everything
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice, plan_after
from retime.schedules.budget import OffloadPlan

if TYPE_CHECKING:
    from retime.mechanisms.memory_budget.planner import StepPlanner
    from retime.mechanisms.memory_budget.plans import BatchRecord

DryRuns = Literal["auto", "off"]
COUNTED = "counted while the first step was trained, without a dry run"
AFTER = "made from what the first step saved and held, without a dry run"
"""Notes of such plans."""

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
        self._saved: dict[Any, tuple[int, tuple[int, ...], list[int]]] = {}

    def begin(self, key: Any, batch: Any, samples: int, may_stop: bool) -> PlannedShape | None:
        """What the first step of a shape is to run under; None: it has to be planned for.

        With ``dry_run="off"`` everything is offloaded, which is the least that a whole batch needs.

        Args:
            may_stop: the step can be stopped in its forward pass, and run again.
        """
        plan = OffloadPlan(samples)
        if self._options.dry_run == "off":
            plan = everything(samples)
        elif not (may_stop and self._roomy(key, batch)):
            return None
        return PlannedShape(samples, PlanChoice(plan))

    def note(self, record: BatchRecord, sizes: Sequence[int]) -> None:
        """What the first step of a shape saved, in bytes, everything offloaded."""
        self._saved[record.key] = record.samples, record.sizes, list(sizes)

    def planned(self, record: BatchRecord, needed_bytes: Callable[[], int | None]) -> PlannedShape | None:
        """What follows from the first step of a shape; None before it, and for a batch that is larger.

        Args:
            needed_bytes: the most that it held, everything offloaded; None where it cannot be measured.

        Raises:
            BudgetError: that is more than the budget.
        """
        samples, batch_sizes, sizes = self._saved.pop(record.key, (-1, (), []))
        if not record.fits(samples, batch_sizes):
            return None
        return PlannedShape(samples, plan_after(samples, sizes, needed_bytes(), self._budget_bytes), note=AFTER)

    def _roomy(self, key: Any, batch: Any) -> bool:
        """Whether the first step of this shape may be trained without a plan.

        Compiled code keeps to itself what it makes, so it cannot be counted.
        """
        if key in self._too_large or any(map(is_lazy, self._model.parameters())):
            return False
        if any(map(is_compiled, self._model.modules())):
            return False
        return _ROOMY * self._standing_bytes(batch) <= self._budget_bytes

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
        """What is there whatever the step does; nothing is run to find out, so states count with the most there are."""
        parameters = list(self._model.parameters())
        trained = strided_bytes(parameter for parameter in parameters if parameter.requires_grad)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        history = max((group.get("history_size", 0) for group in groups), default=0)  # LBFGS keeps two of each
        return strided_bytes(reachable_tensors(self._model, batch)) + (_GRADIENTS + _STATES + 2 * history) * trained
