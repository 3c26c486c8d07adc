"""The refusal of a budget that no plan can keep."""

from __future__ import annotations

from retime.schedules.errors import ScheduleError

_FOR_FINDERS = "For batch size finders this is, on a CPU as on CUDA, a step that runs out of memory."
"""They know their errors by words: Lightning's ``is_oom_error`` looks for "CUDA" and "out of memory", Accelerate's
``should_reduce_batch_size`` for " out of memory." with its full stop.
"""


def sized(nbytes: int) -> str:
    """Write a size to the byte, so that it can be given as a budget, and where it is large in MiB or GiB too."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes} bytes ({nbytes / size:.1f} {unit})"
    return f"{nbytes} bytes"


class BudgetError(ScheduleError, RuntimeError):
    """A byte budget is too small. Finders of batch sizes take it for out of memory, and try a smaller batch.

    Args:
        problem: what was asked for.
        floor_bytes: the smallest budget with which this would work.
        task: the task that needs the most.
        hint: what would help.
        samples: the floor is that of so many samples at once; 0: not known.
    """

    def __init__(self, problem: str, *, floor_bytes: int, task: str, layer: str, hint: str, samples: int = 0) -> None:
        at = f" at task {task!r} of layer {layer!r}" if task else ""
        needed = f"at least {sized(floor_bytes)} are needed{at}"
        super().__init__(f"{problem}: {needed}. {hint.rstrip('.')}. {_FOR_FINDERS}")
        self.floor_bytes = floor_bytes
        self.task = task
        self.layer = layer
        self.hint = hint
        self.samples = samples
