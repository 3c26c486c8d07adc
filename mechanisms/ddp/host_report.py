"""What host memory added up."""

from dataclasses import dataclass

from retime.mechanisms.byte_sizes import show_bytes

__all__ = ["HostReductionReport"]


@dataclass
class HostReductionReport:
    """Counts of one rank.

    Attributes:
        buckets: gradient buckets that were summed.
        bytes: of their gradients.
        how: in what memory, among how many ranks.
    """

    buckets: int = 0
    bytes: int = 0
    how: str = ""

    def __str__(self) -> str:
        if not self.buckets:
            return "gradients on the host: none were summed"
        return f"gradients on the host: {self.buckets} buckets, {show_bytes(self.bytes)}, {self.how}"
