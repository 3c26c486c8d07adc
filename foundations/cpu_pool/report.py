"""What a pool of CPU memory did for the tensors that came from it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from retime.foundations.byte_sizes import show_bytes

__all__ = ["PoolReport"]


@dataclass(frozen=True)
class PoolReport:
    """Bytes of whole pages since the pool was installed.

    Attributes:
        reused_bytes: allocations that were served from free memory as it lay.
        moved_bytes: of allocations that were put together from free memory in pieces, neither copied nor cleared.
        mapped_bytes: asked of the kernel, which cleared them.
        live_bytes: of tensors now.
        retained_bytes: free now, for the next tensors.
        note: why there is no pool; empty if there is.
    """

    reused_bytes: int = 0
    moved_bytes: int = 0
    mapped_bytes: int = 0
    live_bytes: int = 0
    retained_bytes: int = 0
    note: str = ""

    @property
    def faults_avoided(self) -> int:
        """First accesses of a page that a C library would have caused that maps each of these blocks anew."""
        return (self.reused_bytes + self.moved_bytes) // mmap.PAGESIZE

    def __str__(self) -> str:
        if self.note:
            return f"no CPU memory pool: {self.note}"
        allocated = self.reused_bytes + self.moved_bytes + self.mapped_bytes
        share = (self.reused_bytes + self.moved_bytes) / allocated if allocated else 0.0
        return (
            f"CPU memory pool: {share:.1%} of {show_bytes(allocated)} reused "
            f"({show_bytes(self.moved_bytes)} of it moved together), {self.faults_avoided} page faults avoided; "
            f"{show_bytes(self.live_bytes)} live and {show_bytes(self.retained_bytes)} retained now"
        )
