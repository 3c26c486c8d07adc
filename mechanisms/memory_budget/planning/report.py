"""What a memory budget decided and did, to print and to keep in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from retime.foundations.byte_sizes import show_bytes
from retime.foundations.parts import Certificate
from retime.foundations.reasons import because
from retime.mechanisms.memory_budget.offload import OffloadReport
from retime.mechanisms.memory_budget.planning.choice import PlanChoice
from retime.mechanisms.memory_budget.planning.costs import StepCosts

_SHOWN = 4


@dataclass(frozen=True)
class PlannedShape:
    """What was decided for batches of one shape.

    Attributes:
        samples: of a batch.
        choice: the plan, its predicted peak and what it was chosen by.
        certificate: whether and how the batch may be split; None where it is not.
        costs: what was measured; None where a dry run was enough.
        note: why the prediction is not exact; empty if it is.
        source: where the plan comes from, if it was not made now.
        first_step_bytes: that tensors held at most in the first step, where that was trained without a plan; 0 before
            it has ended, or where nobody counts.
    """

    samples: int
    choice: PlanChoice
    certificate: Certificate | None = None
    costs: StepCosts | None = None
    note: str = ""
    source: str = ""
    first_step_bytes: int | None = None

    @property
    def plain(self) -> bool:
        """Whether the plan asks for nothing: batches run as without a budget."""
        return not self.choice.plan.offload and self.choice.plan.sub_batch >= self.samples

    def reserved_bytes(self, budget_bytes: int) -> int:
        """What live tensors, and freed memory cached for the next ones, may take together at most."""
        return self.choice.reserved_bytes(budget_bytes)

    def __str__(self) -> str:
        choice = self.choice
        text = f"batch of {self.samples}" + (" fits" if self.plain else f": {choice.plan}")
        if self.first_step_bytes is None:
            text += f"; predicted peak {show_bytes(choice.peak_bytes)}"
        elif self.first_step_bytes:
            text += f": it allocated {show_bytes(self.first_step_bytes)}"
        if choice.out_bytes:
            text += f", {show_bytes(choice.out_bytes + choice.in_bytes)} moved a step"
        if self.certificate is not None:
            text += f"; {self.certificate}"
        return "; ".join(filter(None, (text, self.note, self.source)))


@dataclass
class BudgetReport:
    """What was planned and done; sizes in bytes."""

    budget_bytes: int
    steps: int = 0
    """Batches."""
    sub_batches: int = 0
    """Forward passes of those batches."""
    plans: int = 0
    """Plans that were made or taken from a checkpoint."""
    shapes: list[PlannedShape] = field(default_factory=list)
    """The last of them."""
    offload: OffloadReport | None = None
    replanned: dict[str, int] = field(default_factory=dict)
    """Plans that were thrown away, by reason."""
    grown_bytes: int = 0
    """The most that the process grew by, with the model; 0 where it cannot be told."""

    def note(self, shape: PlannedShape, most: int) -> None:
        """A plan was made; only the last ``most`` are kept."""
        self.plans += 1
        self.shapes.append(shape)
        del self.shapes[:-most]

    def renew(self, before: PlannedShape, now: PlannedShape) -> None:
        """More is known of a shape."""
        self.shapes = [now if shape is before else shape for shape in self.shapes]

    def __str__(self) -> str:
        text = f"memory budget {show_bytes(self.budget_bytes)}: {self.steps} steps in {self.sub_batches} sub-batches"
        if self.offload is not None and self.offload.storages:
            moved = self.offload.bytes_out + self.offload.bytes_in
            text += f"; {show_bytes(moved)} moved, {self.offload.stalls} waits"
        if self.grown_bytes > self.budget_bytes:
            text += f"; the process grew by {show_bytes(self.grown_bytes)}, which is above the budget"
            text += " (a process's first steps load code once, which no budget counts)"
        text += "".join(f"; {shape}" for shape in self.shapes[-_SHOWN:])
        text += f"; {self.plans - _SHOWN} plans before these" if self.plans > _SHOWN else ""
        return "; ".join(filter(None, (text, because(self.replanned, "replanned"))))
