"""A batch in sub-batches of nearly equal size (moDNN, section 5.1)."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from retime.foundations.parts.split import Split, part_of, samples_in, split_batch

__all__ = ["balanced_parts", "part_lengths"]


def part_lengths(samples: int, count: int) -> list[int]:
    """How many samples each of so many nearly equal parts has; larger first."""
    size, larger = divmod(samples, count)
    return [size + (index < larger) for index in range(count)]


def balanced_parts(batch: Any, sub_batch: int, split: Split = split_batch) -> list[Any]:
    """As few parts of at most ``sub_batch`` samples as there can be, whose sizes differ by one at most; larger first.

    So no part is much smaller than the others: 13 samples in parts of at most 4 are 4, 3, 3 and 3, not 4, 4, 4 and 1.
    The parts of the paper are equal too (moDNN, section 5.1).

    Args:
        split: a hook is asked for two parts of the batch, and then for parts of these.

    Raises:
        ValueError: ``sub_batch`` is below 1, the batch cannot be split, or a hook gave parts of other sizes.
    """
    if sub_batch < 1:
        raise ValueError(f"sub_batch={sub_batch}: a sub-batch has 1 sample or more")
    samples = samples_in(batch, split)
    return _in_parts(batch, samples, -(-samples // sub_batch), split)


def _in_parts(batch: Any, samples: int, count: int, split: Split) -> list[Any]:
    if count <= 1:
        return [batch]
    lengths = part_lengths(samples, count)
    if split is split_batch:
        ends = list(accumulate(lengths))
        return [part_of(batch, slice(first, last), samples) for first, last in zip([0, *ends], ends, strict=False)]
    half = -(-count // 2)
    first = sum(lengths[:half])
    parts = list(split(batch, first))
    sizes = [samples_in(part, split) for part in parts]
    if sizes != [first, samples - first]:
        text = ", ".join(map(str, sizes))
        raise ValueError(
            f"split_batch gave parts of {text} samples for sub_batch={first} of a batch of {samples}: all but the last "
            f"have to have {first}, and the last the rest"
        )
    return [
        *_in_parts(parts[0], first, half, split),
        *_in_parts(parts[1], samples - first, count - half, split),
    ]
