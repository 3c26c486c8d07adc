"""Which part of a batch a dry run takes for a sub-batch."""

from __future__ import annotations

from typing import Any

from retime.foundations.parts.batch_shape import sizes_of
from retime.foundations.parts.split import Split, part_of, samples_in, split_batch

__all__ = ["dry_part"]


def dry_part(batch: Any, first: int, last: int, split: Split = split_batch) -> Any:
    """Samples ``first`` to ``last - 1``; from a ``split_batch`` hook, which chooses by itself, the largest such part.

    Raises:
        ValueError: the batch cannot be split.
    """
    if split is split_batch:
        return part_of(batch, slice(first, last), samples_in(batch))
    if first == 0 and last >= samples_in(batch, split):
        return batch
    parts = split(batch, last - first)
    full = [part for part in parts if samples_in(part, split) == last - first]
    return max(full or parts[:1], key=lambda part: sum(sizes_of(part)))
