"""What a training step costs on this machine, as a plan's chooser needs it: measured by ``calibrate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from retime.mechanisms.memory_budget.dry_run import Size
from retime.schedules.budget import Phase
from retime.schedules.errors import ScheduleError


@dataclass(frozen=True)
class StepCosts:
    """Times of a step's parts, the host tier's bandwidth, and what operations allocate for themselves.

    The defaults say only that more sub-batches and more bytes take longer; they are no measurement.

    Args:
        fixed_ms, sample_ms: forward and backward pass of one sub-batch: a fixed part, and a part for each sample.
        update_ms: the optimizers.
        out_bytes_per_ms, in_bytes_per_ms: to the host and back.
        hidden: the share of a copy's time that computation goes on beside it, 0 to 1.
        operations: what operations allocate for themselves while they run, by phase, layer and name.
        scratch_bytes: needed beyond all that: an allocator's rounding and holes.
        scratch_sample_bytes: of that for each sample of a sub-batch.
        few_samples, few_bytes: sub-batches of so many samples and fewer need so much instead: tensors that are small
            lie in the C library's heap, which grows by more than they need.
        spare_bytes: what a plan leaves free in its budget and is not expected to need.

    Raises:
        ScheduleError: a number is out of range.
    """

    fixed_ms: float = 1.0
    sample_ms: float = 1.0
    update_ms: float = 0.0
    out_bytes_per_ms: float = 1e6
    in_bytes_per_ms: float = 1e6
    hidden: float = 0.0
    operations: Mapping[tuple[Phase, str, str], Size] = field(default_factory=dict)
    scratch_bytes: float = 0.0
    scratch_sample_bytes: float = 0.0
    few_samples: int = 0
    few_bytes: float = 0.0
    spare_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.hidden <= 1:
            raise ScheduleError(f"hidden={self.hidden} is a share: give a number from 0 to 1")
        if self.out_bytes_per_ms <= 0 or self.in_bytes_per_ms <= 0:
            raise ScheduleError("bandwidths must be positive: give bytes a millisecond")

    def scratch(self, sub_batch: int) -> int:
        """Bytes beyond what tensors hold, with so many samples at once."""
        if sub_batch <= self.few_samples:
            return round(self.few_bytes)
        return max(0, round(self.scratch_bytes + self.scratch_sample_bytes * sub_batch))

    def step_ms(self, samples: int, sub_batch: int, out_bytes: int, in_bytes: int, *, ahead: bool = True) -> float:
        """Predicted time of a step.

        Args:
            samples: of the whole batch.
            sub_batch: samples at once.
            out_bytes, in_bytes: copied in one sub-batch.
            ahead: copies run beside the computation; otherwise each is waited for.
        """
        count = -(-samples // sub_batch)
        computing = count * self.fixed_ms + samples * self.sample_ms
        copying = count * (out_bytes / self.out_bytes_per_ms + in_bytes / self.in_bytes_per_ms)
        hidden = min(copying * self.hidden, computing) if ahead else 0.0
        return computing + copying - hidden + self.update_ms
