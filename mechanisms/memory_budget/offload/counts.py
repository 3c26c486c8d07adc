"""What was moved so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OffloadCounts:
    """Running totals of an :class:`OffloadReport`."""

    passes: int = 0
    storages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_skipped: int = 0
    stalls: int = 0
    prefetched: int = 0
