"""The refusal of a budget that no plan can keep."""

from __future__ import annotations

from retime.schedules.errors import ScheduleError


class BudgetError(ScheduleError):
    """A byte budget is too small.

    Args:
        problem: what was asked for.
        floor_bytes: the smallest budget with which this would work.
        task: the task that needs the most.
        layer: its layer.
        hint: what would help.
    """

    def __init__(self, problem: str, *, floor_bytes: int, task: str, layer: str, hint: str) -> None:
        at = f" at task {task!r} of layer {layer!r}" if task else ""
        super().__init__(f"{problem}: at least {floor_bytes} bytes are needed{at}. {hint}")
        self.floor_bytes = floor_bytes
        self.task = task
        self.layer = layer
        self.hint = hint
