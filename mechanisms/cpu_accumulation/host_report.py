"""What host memory added up."""

from dataclasses import dataclass

from retime.foundations.byte_sizes import show_bytes
from retime.mechanisms.cpu_accumulation.host_update import HostUpdateReport

__all__ = ["HostReductionReport"]


@dataclass
class HostReductionReport:
    """Counts of one rank.

    Attributes:
        buckets: gradient buckets that were summed.
        bytes: of their gradients.
        how: in what memory, among how many ranks.
        update: what the ranks of the machine updated together; None: each updates all.
    """

    buckets: int = 0
    bytes: int = 0
    how: str = ""
    update: HostUpdateReport | None = None

    def __str__(self) -> str:
        if not self.buckets:
            return "gradients on the host: none were summed"
        update = "" if self.update is None else f"; {self.update}"
        return (
            f"gradients on the host: {self.buckets} buckets with {show_bytes(self.bytes)} over all steps, "
            f"{self.how}{update}"
        )
