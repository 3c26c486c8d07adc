"""What a rank updated for its machine, and what state it holds for that."""

from __future__ import annotations

from dataclasses import dataclass

from retime.foundations.byte_sizes import show_bytes

__all__ = ["HostUpdateReport"]


@dataclass(frozen=True)
class HostUpdateReport:
    """Counts of one rank.

    Attributes:
        steps: that the ranks of the machine did together.
        updated_bytes: of the parameters that this rank updates.
        parameter_bytes: of all that are divided.
        state_bytes: of optimizer state on this rank, while updates were divided.
        whole_state_bytes: that this rank would hold under plain ``ddp``.
        reasons: why every rank does whole steps of an optimizer.
    """

    steps: int = 0
    updated_bytes: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0
    whole_state_bytes: int = 0
    reasons: tuple[str, ...] = ()

    def beside(self, other: HostUpdateReport) -> HostUpdateReport:
        """Of two optimizers."""
        return HostUpdateReport(
            self.steps + other.steps,
            self.updated_bytes + other.updated_bytes,
            self.parameter_bytes + other.parameter_bytes,
            self.state_bytes + other.state_bytes,
            self.whole_state_bytes + other.whole_state_bytes,
            (*self.reasons, *other.reasons),
        )

    def __str__(self) -> str:
        whole = "".join(f"; whole on every rank: {reason}" for reason in self.reasons)
        return (
            f"updates on the host: {self.steps} steps; this rank updates {show_bytes(self.updated_bytes)} of "
            f"{show_bytes(self.parameter_bytes)} of parameters, and holds {show_bytes(self.state_bytes)} of optimizer "
            f"state, where plain ddp holds {show_bytes(self.whole_state_bytes)}{whole}"
        )
