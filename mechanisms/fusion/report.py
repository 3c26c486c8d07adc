"""What optimizer fusion really did."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from retime.foundations.messages import Report, each_because, show_bytes

Mode = Literal["backward", "forward"]
MODES: tuple[Mode, ...] = ("backward", "forward")


def check_mode(mode: str) -> Mode:
    """Return ``mode`` if it names a fusion, else raise ValueError with the choices."""
    for choice in MODES:
        if mode == choice:
            return choice
    raise ValueError(f"unknown fusion mode {mode!r}: use mode='backward' or mode='forward'")


_LATE: dict[Mode, str] = {
    "backward": "first steps, last buckets, parameters with hooks",
    "forward": "parameters whose reads cannot be seen",
}


@dataclass
class FusionReport(Report):
    """Counts since the optimizer was fused; sizes in bytes."""

    mode: Mode
    parameters: int = 0
    """Parameters that the mechanism follows."""
    steps: int = 0
    """Optimizer steps in which fusion was active."""
    fused_updates: int = 0
    """Parameter updates that ran inside a backward (or a later forward) pass."""
    late_updates: int = 0
    """Parameter updates of active steps that ran in ``optimizer.step()`` all the same: the last bucket, parameters
    seen for the first time, parameters that other hooks read."""
    buckets: int = 0
    """Kernel groups that carried the fused updates."""
    largest_bucket_bytes: int = 0
    peak_gradient_bytes: int = 0
    """Most bytes of gradients alive at one time between two steps, as far as the parameters' hooks can see."""
    unfused: dict[str, int] = field(default_factory=dict)
    """Parameters that are updated in ``optimizer.step()`` although the others are fused, by reason."""
    plain_steps: dict[str, int] = field(default_factory=dict)
    """Steps that ran the plain way, by reason."""

    def what_was_done(self) -> list[str]:
        return [
            f"{self.mode} fusion: {self.fused_updates} updates of {self.parameters} parameters fused into "
            f"{self.buckets} buckets over {self.steps} steps"
        ]

    def what_stayed_plain(self) -> list[str]:
        late = [f"{self.late_updates} updates in optimizer.step() ({_LATE[self.mode]})"] if self.late_updates else []
        unfused = [f"{count} parameters {reason}" for reason, count in self.unfused.items()]
        return [*late, *unfused, *each_because(self.plain_steps, "steps")]

    def what_was_measured(self) -> list[str]:
        sizes = {"largest bucket": self.largest_bucket_bytes, "peak gradient memory": self.peak_gradient_bytes}
        there = [f"{what}: {show_bytes(size)}" for what, size in sizes.items() if size]
        return [", ".join(there)] if there else []

    def followed_by(self, later: "FusionReport") -> "FusionReport":
        """One report of two times in which the same parameters were fused: counts add up, sizes and peaks do not."""
        return self._with(later, max)

    def beside(self, other: "FusionReport") -> "FusionReport":
        """One report of two optimizers, whose gradients are alive at the same time."""
        return self._with(other, operator.add)

    def _with(self, other: "FusionReport", both: Callable[[int, int], int]) -> "FusionReport":
        """Both reports in one; ``both`` puts together what counts parameters and their bytes."""
        return FusionReport(
            self.mode,
            parameters=both(self.parameters, other.parameters),
            steps=self.steps + other.steps,
            fused_updates=self.fused_updates + other.fused_updates,
            late_updates=self.late_updates + other.late_updates,
            buckets=self.buckets + other.buckets,
            largest_bucket_bytes=max(self.largest_bucket_bytes, other.largest_bucket_bytes),
            peak_gradient_bytes=both(self.peak_gradient_bytes, other.peak_gradient_bytes),
            unfused=_merged(self.unfused, other.unfused, both),
            plain_steps=_merged(self.plain_steps, other.plain_steps, operator.add),
        )

    def note_unfused(self, reason: str) -> None:
        """Count one parameter that is updated in ``optimizer.step()``."""
        self.unfused[reason] = self.unfused.get(reason, 0) + 1

    def note_plain(self, reason: str) -> None:
        """Count one step that ran the plain way."""
        self.plain_steps[reason] = self.plain_steps.get(reason, 0) + 1


def _merged(one: dict[str, int], other: dict[str, int], both: Callable[[int, int], int]) -> dict[str, int]:
    return {reason: both(one.get(reason, 0), other.get(reason, 0)) for reason in one | other}
