"""Whether a step does the same on a whole batch as on the few samples of it that were probed, but for their number.

Its operations have to be the same, and each number that it hands to them too, or grow as the number of samples does. A
``max(len(x), 6)`` or an ``if len(x) > 8`` is neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

from retime.mechanisms.memory_budget.separability.flow import Flow, Operation

__all__ = ["unlike"]

_SAME = 1e-9
_SCALES = {"mul", "div"}
_COUNTS = {"add"}
_SEVERAL = 3
"""So many sizes show whether something grows as they do."""


def unlike(flows: Sequence[Flow], samples: Sequence[int]) -> str:
    """What runs on batches of these sizes do in another way; empty if there is nothing.

    Args:
        flows: of runs of one step.
        samples: how many samples each has, all of them different.
    """
    towards = [flow.towards_loss() for flow in flows]
    chosen: set[int] = set()
    for operations in zip_longest(*towards):
        last = operations[-1]
        if None in operations or len({one.name for one in operations}) > 1:
            names = ", ".join(one.name if one is not None else "nothing more" for one in operations)
            return f"it runs other operations: {names}"
        if last.chosen or any(one.storage in chosen for one in last.reads):
            chosen.update(one.storage for one in last.writes)
        if reason := _difference(operations, samples, any(one.storage in chosen for one in last.reads)):
            return reason
    return ""


def _difference(runs: Sequence[Operation], samples: Sequence[int], chosen: bool) -> str:
    name = runs[0].name
    if len({_settings(one) for one in runs}) > 1:
        return f"{name} has other settings"
    for numbers in _columns([one.constants for one in runs]):
        if not _allowed(runs[0], numbers, samples, chosen):
            return f"{name} is given {', '.join(f'{number:g}' for number in numbers)}"
    if not all(math.isnan(one.divisor) for one in runs) and not _scales([one.divisor for one in runs], samples, False):
        return f"{name} is given {', '.join(f'{one.divisor:g}' for one in runs)}"
    for reads in zip(*(one.reads for one in runs), strict=False):
        for lengths in _columns([one.shape for one in reads]):
            if not _affine(lengths, samples):
                return f"{name} takes {', '.join(f'{length:g}' for length in lengths)} rows"
    return ""


def _settings(one: Operation) -> tuple[object, ...]:
    shapes = tuple(len(read.shape) for read in one.reads)
    return one.random, one.reduction, one.ignored, one.weighed, one.counting, len(one.constants), shapes


def _columns(rows: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    return list(zip(*rows, strict=True))


def _allowed(one: Operation, numbers: Sequence[float], samples: Sequence[int], chosen: bool) -> bool:
    if all(number == numbers[0] for number in numbers):
        return True
    if one.name in _SCALES:
        return _scales(numbers, samples, chosen)
    if one.name in _COUNTS and one.reads and not any(read.shape or read.learns for read in one.reads):
        return _scales(numbers, samples, False)  # a metric's count of its samples; dividing by it is looked at there
    return not one.pointwise and all(isinstance(number, int) for number in numbers) and _affine(numbers, samples)


def _scales(numbers: Sequence[float], samples: Sequence[int], chosen: bool) -> bool:
    """Whether a factor or a divisor is always the same, or grows or falls as the number of samples grows.

    Args:
        chosen: or as the number of rows that were chosen by values does.
    """
    if not all(map(math.isfinite, numbers)) or 0 in numbers:
        return all(number == numbers[0] for number in numbers)
    if chosen:
        return _affine(numbers, samples) or _affine([1 / number for number in numbers], samples)
    each = [number / size for number, size in zip(numbers, samples, strict=True)]
    shared = [number * size for number, size in zip(numbers, samples, strict=True)]
    return any(max(law) - min(law) <= _SAME * max(map(abs, law)) for law in (numbers, each, shared))


def _affine(numbers: Sequence[float], samples: Sequence[int]) -> bool:
    """Whether numbers are the same, or grow with the samples at the same rate."""
    if len(samples) < _SEVERAL:
        return True
    (one, two, *rest), (few, more, *larger) = numbers, samples
    rate = (two - one) / (more - few)
    return all(
        abs(number - two - rate * (size - more)) <= _SAME * max(map(abs, numbers), default=0)
        for number, size in zip(rest, larger, strict=True)
    )
