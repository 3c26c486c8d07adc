"""In what way a batch runs, and the error where there is none."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["NoLossError", "Way"]


class Way(IntEnum):
    """How a batch runs: as without a budget, at once but with storages offloaded, or in sub-batches."""

    PLAIN = 0
    WHOLE = 1
    PARTS = 2


class NoLossError(ValueError):
    """A step gave no loss for this batch, so there is nothing to plan from or to go backward from."""
