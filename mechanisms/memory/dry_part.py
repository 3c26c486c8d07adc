"""Which part of a batch a dry run takes for a sub-batch."""

from __future__ import annotations

from typing import Any

from retime.mechanisms.memory.split import Split, part_of, samples_in, split_batch

__all__ = ["dry_part"]


def dry_part(batch: Any, first: int, last: int, split: Split = split_batch) -> Any:
    """Samples ``first`` to ``last - 1``; from a ``split_batch`` hook, which chooses by itself, any part of that size.

    Raises:
        ValueError: the batch cannot be split.
    """
    if split is split_batch:
        return part_of(batch, slice(first, last), samples_in(batch))
    if first == 0 and last >= samples_in(batch, split):
        return batch
    return split(batch, last - first)[0]
