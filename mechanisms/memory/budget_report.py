"""What a memory budget decided and did, to print and to keep in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retime.mechanisms.byte_sizes import show_bytes
from retime.mechanisms.memory.certificate import Certificate
from retime.mechanisms.memory.costs import StepCosts
from retime.mechanisms.memory.offload import OffloadReport
from retime.mechanisms.memory.search import PlanChoice
from retime.schedules.memory import OffloadPlan

_KEPT = (
    "in_flight_bytes",
    "peak_bytes",
    "scratch_bytes",
    "spare_bytes",
    "tensor_bytes",
    "step_ms",
    "plain_ms",
    "out_bytes",
    "in_bytes",
)
"""What a checkpoint keeps of a choice beside its plan."""
_SHOWN = 4
_FROM_CHECKPOINT = "plan of an earlier run"


@dataclass(frozen=True)
class PlannedShape:
    """What was decided for batches of one shape.

    Attributes:
        samples: of a batch.
        choice: the plan, its predicted peak and times.
        certificate: whether and how the batch may be split; None where it is not.
        costs: what was measured; None where a dry run was enough.
        note: why the prediction is not exact; empty if it is.
    """

    samples: int
    choice: PlanChoice
    certificate: Certificate | None = None
    costs: StepCosts | None = None
    note: str = ""

    def held_bytes(self, budget_bytes: int) -> int:
        """What tensors, and what they have freed, are to hold together at most."""
        return self.choice.held_bytes(budget_bytes)

    def kept(self) -> dict[str, Any]:
        """All but the certificate and costs, in plain types for a checkpoint."""
        numbers = {name: getattr(self.choice, name) for name in _KEPT}
        return {"samples": self.samples, "plan": str(self.choice.plan), **numbers, "note": self.note}

    @classmethod
    def of_kept(cls, kept: Mapping[str, Any]) -> PlannedShape:
        """The shape that :meth:`kept` gave, with a note that says so."""
        choice = PlanChoice(OffloadPlan.parse(kept["plan"]), **{name: kept[name] for name in _KEPT})
        notes = [note for note in kept["note"].split("; ") if note and note != _FROM_CHECKPOINT]
        return cls(kept["samples"], choice, note="; ".join([*notes, _FROM_CHECKPOINT]))

    def __str__(self) -> str:
        choice = self.choice
        text = f"batch of {self.samples}: {choice.plan}; predicted peak {show_bytes(choice.peak_bytes)}"
        if choice.out_bytes:
            text += f", {show_bytes(choice.out_bytes + choice.in_bytes)} moved a step"
        if choice.step_ms > choice.plain_ms:
            text += f", predicted {choice.step_ms / choice.plain_ms:.2f} x the unlimited step's time"
        if self.certificate is not None:
            text += f"; {self.certificate}"
        return text + (f"; {self.note}" if self.note else "")


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

    def note(self, shape: PlannedShape, most: int) -> None:
        """A plan was made; only the last ``most`` are kept."""
        self.plans += 1
        self.shapes.append(shape)
        del self.shapes[:-most]

    def __str__(self) -> str:
        text = f"memory budget {show_bytes(self.budget_bytes)}: {self.steps} steps in {self.sub_batches} sub-batches"
        if self.offload is not None and self.offload.storages:
            moved = self.offload.bytes_out + self.offload.bytes_in
            text += f"; {show_bytes(moved)} moved, {self.offload.stalls} waits"
        text += "".join(f"; {shape}" for shape in self.shapes[-_SHOWN:])
        text += f"; {self.plans - _SHOWN} plans before these" if self.plans > _SHOWN else ""
        return text + "".join(f"; {count} replanned because {reason}" for reason, count in self.replanned.items())
