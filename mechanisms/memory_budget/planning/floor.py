"""The least memory that a step can run in, and the refusal of a budget below it."""

from __future__ import annotations

from dataclasses import dataclass, field

from retime.mechanisms.memory_budget.dry_run import LargestTask
from retime.schedules.budget import BudgetError, OffloadPlan, sized


@dataclass(frozen=True)
class MemoryFloor:
    """The least memory that a step can run in.

    Attributes:
        bytes: the smallest budget: every smaller one is refused, and this one is not.
        sub_batch: with so many samples at once.
        resident_bytes: of these, parameters, buffers, gradients, optimizer states and the batch.
        scratch_bytes: of these, what is needed beside tensors and what operations allocate.
        task: the operation that needs the most.
        no_offload: why nothing can be offloaded; empty if storages can.
        plan: what runs in the floor.
    """

    bytes: int
    sub_batch: int
    resident_bytes: int
    scratch_bytes: int
    task: LargestTask
    no_offload: str = ""
    plan: OffloadPlan = field(default_factory=lambda: OffloadPlan(1))

    def require(self, budget_bytes: int) -> None:
        """Refuse a budget below the floor.

        Raises:
            BudgetError: it is.
        """
        if budget_bytes < self.bytes:
            raise self.refusal(budget_bytes)

    def refusal(self, budget_bytes: int, fewer: str | None = None) -> BudgetError:
        """The error that says why a budget is too small.

        Args:
            budget_bytes: the budget.
            fewer: how fewer samples at once could run, or why they cannot; None: the caller chooses sub-batch sizes.
        """
        return BudgetError(
            f"a budget of {sized(budget_bytes)} is below this step's floor",
            floor_bytes=self.bytes,
            task=f"{self.task.name} ({self.task.phase})",
            layer=self.task.layer,
            hint=self._hint(budget_bytes, fewer),
            samples=self.sub_batch,
        )

    def _hint(self, budget_bytes: int, fewer: str | None) -> str:
        if fewer is None:
            fewer = f"The step runs {self.sub_batch} samples at once; smaller sub-batches, if allowed, would help"
        staying = (
            f"{sized(self.resident_bytes)} of them are parameters, gradients, optimizer states and the batch: an "
            "optimizer with less state, a smaller batch or parameters in a smaller dtype would help"
        )
        mostly_stays = self.resident_bytes > self.task.nbytes + self.scratch_bytes
        hints = [staying] if mostly_stays else []
        if self.sub_batch > 1 and fewer and not (mostly_stays and self.resident_bytes >= budget_bytes):
            hints.append(fewer)
        samples = f"{self.sub_batch} samples" if self.sub_batch > 1 else "one sample"
        alone = f"That layer alone needs {sized(self.task.nbytes)} for {samples}: smaller samples would help"
        return ". ".join([*(hints or [alone]), *filter(None, [_sentence(self.no_offload)])])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
