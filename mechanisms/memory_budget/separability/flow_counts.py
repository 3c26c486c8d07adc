"""What a tensor counts in the batch: followed operation by operation, so that it holds for any values.

A mask that is the batch's own, or a comparison of the batch's entries with a number, counts what the loss is a mean
over. A product of two masks, a mask made of lengths, or class numbers into which others were written may agree with
such a count on the samples that are probed, and not on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from retime.foundations.parts import COMPARED, Count, compares
from retime.mechanisms.memory_budget.separability.flow import Operand, Operation, Place

__all__ = ["Counted", "counted_after", "entries_of", "entries_read"]

_COPIES = {"clone", "_to_copy", "_unsafe_view", "_reshape_copy", "alias", "lift_fresh"}
_TINY = 1e-6
"""What keeps a division from one by zero."""


@dataclass(frozen=True)
class Counted:
    """Values that are entries of one tensor of the batch, or tell which of them compare so, or sums of that.

    Attributes:
        count: ``"sum"``: the entries themselves; else 1 where they compare so, and 0.
        shape: of the batch's tensor.
        integral: whole numbers.
        summed: sums over some dimensions.
        appended: each row has one more entry at its end, which is this.
        some: it may be not all entries.
    """

    count: Count
    shape: tuple[int, ...]
    integral: bool
    summed: bool = False
    appended: float | None = None
    some: bool = False

    @property
    def exactly(self) -> Count | None:
        """What its sum is, whatever the batch's values are."""
        return self.count if not self.some and self.appended is None else None

    def other_than(self, value: float) -> Counted | None:
        """Which of the entries are not this number."""
        return _compared(self, "!=", value)


def entries_of(place: Place) -> Counted:
    """A tensor of the batch."""
    truth = place.dtype == torch.bool
    count = Count(place.name, "==", 1.0) if truth else Count(place.name, "sum")
    return Counted(count, place.shape, not place.dtype.is_floating_point)


def entries_read(counted: Counted | None, operand: Operand) -> Counted | None:
    """What an operation reads through its window on such a tensor."""
    if counted is None or operand.covers == "all":
        return counted
    if operand.covers == "all but first" and not counted.summed and not counted.some and len(counted.shape) > 1:
        left = math.prod(counted.shape) // counted.shape[1] * (counted.shape[1] - (counted.appended is None))
        if math.prod(operand.shape) == left and not counted.count.skip_first:
            return replace(counted, count=replace(counted.count, skip_first=True))
    return None if counted.summed or counted.appended is not None else replace(counted, some=True)


def counted_after(operation: Operation, inputs: Sequence[Counted | None]) -> Counted | None:
    """What an operation gives, by what it reads; None where that cannot be counted."""
    one = inputs[0] if len(inputs) == 1 else None
    if one is None or not operation.writes:
        return None
    name, numbers = operation.name, operation.numbers
    if name in _COPIES:
        return _copied(one, operation.writes[0].dtype)
    if name == "sum":
        return replace(one, summed=True) if one.appended is None else None
    if name in ("clamp", "clamp_min"):
        lowest = 1.0 if one.integral else _TINY
        return one if one.summed and operation.floor <= lowest else None
    if name == "add":
        return one if one.summed and max(map(abs, numbers), default=1.0) <= _TINY else None
    if one.summed:
        return None
    if name in COMPARED and numbers:
        return _compared(one, COMPARED[name], numbers[0])
    if name == "logical_not" or (name == "bitwise_not" and operation.reads[0].dtype == torch.bool):
        return _compared(one, "==", 0.0)
    if name == "constant_pad_nd" and operation.pad == (0, 1) and len(one.shape) == 2 and one.exactly is not None:
        return replace(one, appended=numbers[0]) if numbers and not one.count.skip_first else None
    return None


def _copied(one: Counted, dtype: torch.dtype) -> Counted | None:
    if dtype == torch.bool:
        return None if one.summed else _compared(one, "!=", 0.0)
    return one if one.integral or dtype.is_floating_point else None


def _compared(one: Counted, comparison: str, value: float) -> Counted | None:
    if one.summed or (one.appended is not None and compares(one.appended, comparison, value)):
        return None
    one = replace(one, appended=None, integral=True)
    if one.count.comparison == "sum":
        return replace(one, count=replace(one.count, comparison=comparison, value=value))
    kept = [truth for truth in (0.0, 1.0) if compares(truth, comparison, value)]
    return one if kept == [1.0] else replace(one, count=one.count.opposite()) if kept == [0.0] else None
