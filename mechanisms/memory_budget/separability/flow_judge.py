"""Whether what flows into a loss from several samples depends on their values in a way that a probe cannot show."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce

import torch

from retime.mechanisms.memory_budget.separability.flow import (
    READS,
    Counted,
    Divisor,
    Flow,
    Label,
    Operand,
    Operation,
    counted_after,
    either,
    entries_of,
    entries_read,
)

__all__ = ["FlowVerdict", "judge_flow"]

_COPIES = {"clone", "_to_copy", "copy", "lift_fresh", "cat", "stack", "_unsafe_view", "_reshape_copy"}
_ADDED = {"add", "sub", "rsub", "neg", "sum", "mean"}
_PRODUCTS = {"mul", "div", "mm", "bmm", "addmm", "addmv", "baddbmm", "mv", "dot", "vdot", "linear"}
_COLLAPSES = {"sum", "mean", "index_add", "scatter_add", "index_put", *_PRODUCTS} - {"mul", "div"}
_INTO_ROWS = {"index_add", "scatter_add", "index_put", "scatter", "scatter_reduce", "index_copy"}
"""They add to or write into what there is, so its rows are those of the result."""
_WITHOUT_VALUES = {"zeros_like", "ones_like", "empty_like", "full_like"}
_WITHOUT_VALUES |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"}
_COUNTED_VALUES = {"bincount", "histc", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
"""What they give for one sample depends on how many others have the same value."""
_NUMBERED = {"arange", "linspace", "logspace", "range", "eye"}
_CLASSES = {"argmax", "argmin", "topk", "sort"}
_MOST_SAMPLES = 1000  # of a probe, and more
_BY_POSITION = "it picks samples of the batch by their position"
_POSITIONS = "it computes with the positions of samples of the batch"


@dataclass(frozen=True)
class FlowVerdict:
    """What two runs show.

    Attributes:
        reason: why parts may not add up for other values; empty if they do.
        weights: the reason is a count that nobody can know before; someone who gives it can rule it out.
        divisors: what the loss is divided by, if that is in the batch.
        read: positions among all reads of values of those that depend on samples.
        means: it contains a mean over samples.
        other_operations: the runs cannot be compared, since they did not do the same.
    """

    reason: str = ""
    weights: bool = False
    divisors: frozenset[Divisor] = frozenset()
    read: tuple[int, ...] = ()
    other_operations: bool = False
    means: bool = False


def judge_flow(whole: Flow, part: Flow) -> FlowVerdict:
    """Compare a run on some samples with one on fewer of them."""
    read = _reads_of_samples(whole)
    towards, fewer_towards = whole.towards_loss(), part.towards_loss()
    names, fewer = [one.name for one in towards], [one.name for one in fewer_towards]
    if names != fewer:
        at = next((at for at, (one, two) in enumerate(zip(names, fewer, strict=False)) if one != two), None)
        where = f"{names[at]} and {fewer[at]} are the first to differ" if at is not None else "it runs more of them"
        reason = f"the step runs other operations on more samples than on fewer: {where}"
        return FlowVerdict(reason, read=read, other_operations=True)
    judge = _Judge(whole, part)
    for operation, other in zip(towards, fewer_towards, strict=True):
        judge.follow(operation, other)
    return replace(judge.verdict(), read=read)


def _reads_of_samples(flow: Flow) -> tuple[int, ...]:
    """Positions among all reads of values of those that depend on the batch."""
    sampled = set(flow.places)
    found, reads = [], 0
    for operation in flow.operations:
        depends = any(one.storage in sampled for one in operation.reads)
        if operation.name in READS:
            if depends:
                found.append(reads)
            reads += 1
        elif depends:
            sampled.update(one.storage for one in operation.writes)
    return tuple(found)


class _Judge:
    def __init__(self, whole: Flow, part: Flow) -> None:
        self._whole = whole
        self._labels: dict[int, Label] = {}
        fewer = {place.name: place for place in part.places.values()}
        self._ratios = {
            ratio
            for place in whole.places.values()
            if place.name in fewer
            for ratio in _growths(place.shape, fewer[place.name].shape)
        }
        for number, place in whole.places.items():
            other = fewer.get(place.name)
            if other is not None and place.same_as(other):  # it goes to all parts
                self._labels[number] = Label(computed=True)
            else:
                grows = other is not None and place.shape != other.shape
                self._labels[number] = Label(
                    sampled=True, places=frozenset((place.name,)), grows=grows, counted=entries_of(place)
                )

    def verdict(self) -> FlowVerdict:
        """After all operations on the way to the loss."""
        loss = self._labels.get(self._whole.loss)
        if loss is None or not loss.sampled:
            reason = "the loss comes from where its operations cannot be followed, or it does not depend on the batch"
            return FlowVerdict(reason)
        loss = loss.settled()
        if loss.sums and (loss.means or loss.divisors):
            loss = loss.flagged("the loss adds sums over samples to means over them")
        if loss.sums and loss.constant:
            loss = loss.flagged("the loss adds what does not depend on samples to sums over them")
        return FlowVerdict(loss.reason, loss.weights, loss.divisors, means=loss.means)

    def follow(self, operation: Operation, part: Operation) -> None:
        """The next operation, in both runs."""
        inputs = [self._of(one, other) for one, other in zip(operation.reads, part.reads, strict=False)]
        if operation.view or not operation.writes:
            return
        step = _Step(operation, part, inputs, self._ratios)
        made = replace(step.label(), counted=counted_after(operation, [label.counted for label in inputs]))
        for one, grown in zip(operation.writes, step.grown, strict=False):
            label = replace(made, grows=made.sampled and (grown or made.rows is not None))
            kept = self._labels.get(one.storage) if one.storage in step.storages else None
            self._labels[one.storage] = label if kept is None else kept.joined(label)

    def _of(self, one: Operand, other: Operand) -> Label:
        label = self._labels.get(one.storage)
        if label is not None:
            label = replace(label, counted=entries_read(label.counted, one))
        if label is None:  # made before the step, or where nobody sees it
            grows = one.shape != other.shape
            return Label(sampled=grows, computed=one.storage not in self._whole.fresh, grows=grows)
        if label.grows and one.shape == other.shape and label.rows is None:
            return label.flagged(_BY_POSITION)
        if label.sampled and label.rows is None and not self._ratios.issuperset(_growths(one.shape, other.shape)):
            return label.flagged(_BY_POSITION)  # of 5 samples 4, say, or 10 pairs
        return label


class _Step:
    """One operation, in both runs."""

    def __init__(self, operation: Operation, part: Operation, inputs: list[Label], ratios: set[Fraction]) -> None:
        self._ratios = ratios
        self.operation, self.part, self.inputs = operation, part, inputs
        self.storages = {one.storage for one in operation.reads}
        self.grown = [one.shape != two.shape for one, two in zip(operation.writes, part.writes, strict=False)]
        grows = [one.shape != two.shape for one, two in zip(operation.reads, part.reads, strict=False)]
        sampled = [label for label in inputs if label.sampled]
        self.growing = [one for one, more in zip(inputs, grows, strict=False) if one.sampled and (more or one.rows)]
        self.collapsed = [one for one in sampled if not any(one is other for other in self.growing)]

    def label(self) -> Label:
        operation, name, inputs = self.operation, self.operation.name, list(self.inputs)
        grown = any(self.grown)
        if name in _WITHOUT_VALUES:
            return Label()
        if operation.random and (grown or self.growing or self.collapsed):
            inputs.append(Label(sampled=grown, computed=True))
        if not inputs:
            return Label(reason=_POSITIONS) if grown and name in _NUMBERED else Label()
        if name in _INTO_ROWS or (name == "index" and operation.order < 0):  # rows by their numbers
            inputs = [inputs[0], *(replace(one, reason="") if one.reason == _POSITIONS else one for one in inputs[1:])]
        label = reduce(Label.joined, inputs)
        if not label.sampled:
            return replace(label, scaled=label.scaled or (grown and self._factor() != 1))
        label = replace(label, classes=self._classes(label))
        if operation.chosen:
            chosen = reduce(Label.joined, (inputs[at] for at in operation.chosen))
            chosen = replace(chosen, rows=None, counted=_rows_counted(name, chosen))
            return replace(self._mixing(label), rows=either(label.rows, chosen))
        if name in _INTO_ROWS:
            label = replace(label, rows=inputs[0].rows)
        label = self._mixing(label)
        if operation.target >= 0 and operation.reduction == 1:
            label = _divided_by_classes(operation, label, inputs[operation.target])
        if self.collapsed:
            label = self._combined(label, grown)
        if label.rows is not None and _over_rows(operation):
            if name == "mean" or (operation.reduction == 1 and operation.target < 0):
                return label.settled(_ratio(math.prod(self.part.reads[0].shape), math.prod(operation.reads[0].shape)))
            return replace(label, rows=None, cut=either(label.cut, label.rows), sums=True)
        if label.cut is not None and name in ("mul", "div") and operation.numbers:
            return label.by_chosen(label.cut, _ratio(self.part.numbers[0], operation.numbers[0]))
        if (factor := self._factor()) != 1:
            label = label.shared(1 if 1 / factor in self._ratios else -1 if factor in self._ratios else 0, grown)
        if self.growing and not grown and label.rows is None:
            label = self._taken_over_samples(label)
        # what no gradient flows through, such as a metric's state, shifts the loss alone, which the probe compares
        apart = any(read.learns and not one.sampled for read, one in zip(operation.reads, self.inputs, strict=False))
        if apart and not grown and not self.growing and (name in _ADDED or name in ("cat", "stack")):
            label = replace(label, constant=True)
        scaled = [one.scaled for one in self.inputs]
        alike = sum(scaled) == 1 if name in _PRODUCTS else all(scaled) and (name in _COPIES or name in _ADDED)
        if grown and any(scaled) and not alike:
            label = label.flagged(f"{name} is applied to values that are divided by how many samples there are")
        linear = name in _COLLAPSES or name in _COPIES or operation.reduction
        if not grown and self.growing and label.rows is None and label.computed and not linear:
            label = label.flagged(f"{name} is taken over samples of the batch")
        return label

    def _factor(self) -> Fraction:
        """How much larger what it multiplies by is with more samples."""
        one, two, name = self.operation, self.part, self.operation.name
        if name not in ("mul", "div"):
            return Fraction(1)
        whole, part = one.numbers[:1], two.numbers[:1]
        if not whole and one.scale >= 0 and not self.inputs[one.scale].sampled and not math.isnan(one.divisor):
            whole, part = (one.divisor,), (two.divisor,)
        if whole == part or not all(number and math.isfinite(number) for number in (*whole, *part)):
            return Fraction(1)
        factor = Fraction(whole[0] / part[0]).limit_denominator(_MOST_SAMPLES)
        return factor if name == "mul" else 1 / factor

    def _taken_over_samples(self, label: Label) -> Label:
        operation = self.operation
        if operation.target >= 0 and operation.reduction == 1 and label.divisors:
            return label.flagged("a mean is taken over what is divided by samples") if label.scaled else label
        averaged = operation.name == "mean" or operation.reduction == 1
        if averaged and label.scaled:
            return label.flagged("a mean is taken over values that are divided by how many samples there are")
        mean = averaged or label.scaled
        return replace(label, sums=label.sums or not mean, means=label.means or mean, scaled=False)

    def _classes(self, label: Label) -> bool:
        name = self.operation.name
        if name == "_to_copy" and self.operation.reads[0].dtype == torch.bool:
            return True
        return name in _CLASSES or (label.classes and name in _COPIES)

    def _mixing(self, label: Label) -> Label:
        operation = self.operation
        if operation.counting or operation.name in _COUNTED_VALUES:
            return label.flagged(f"{operation.name} counts how many samples of the batch have the same value")
        if any(_pairs(one, two) for one, two in zip(operation.writes, self.part.writes, strict=False)):
            return label.flagged(f"{operation.name} pairs samples of the batch with one another")
        if operation.order >= 0 and any(one.sampled for at, one in enumerate(self.inputs) if at != operation.order):
            rows = self.inputs[operation.order]
            found = operation.name != "index" and rows.rows is not None  # it writes where it read
            if not found and (rows.computed or not rows.places):
                return label.flagged(f"{operation.name} takes samples of the batch in another order")
        if not operation.along or operation.name in ("sum", "mean") or not self.inputs[0].sampled:
            return label
        one, two = operation.reads[0].shape, self.part.reads[0].shape
        if len(one) == len(two) and any(one[dim] != two[dim] for dim in operation.along if dim < len(one)):
            return label.flagged(f"{operation.name} runs along the samples of the batch")
        return label

    def _combined(self, label: Label, grown: bool) -> Label:
        """Something that was collapsed over samples is among the operands."""
        name = self.operation.name
        if not label.computed and not grown:
            return label  # a number that follows from what is in the batch
        if not grown and (name in _COPIES or name in _ADDED):
            return label
        counted = [one for one in self.collapsed if not one.computed]
        computed = [one for one in self.collapsed if one.computed]
        if len(counted) == 1 and name == "div" and self.inputs[-1] is counted[0]:
            label = label.divided(self._divisor(counted[0]))
        elif counted:
            label = label.flagged(f"{name} is applied to a number that follows from all samples")
        if not computed:
            return label
        sampled = len(self.growing) + len(computed)
        below = name == "div" and len(self.inputs) == 2 and any(self.inputs[1] is one for one in computed)
        if not grown and sampled == 1 and name in _PRODUCTS and not below:
            return label
        if below:
            return label.flagged("the loss is divided by what follows from computed values of all samples", True)
        return label.flagged(f"{name} is applied to a value that is taken over all samples")

    def _divisor(self, by: Label) -> Divisor:
        ratio = _ratio(self.part.divisor, self.operation.divisor)
        summed = by.counted if by.counted is not None and by.counted.summed else None
        return Divisor(by.places, ratio, count=summed.exactly if summed else None)


def _divided_by_classes(operation: Operation, label: Label, target: Label) -> Label:
    if operation.weighed:
        return label.flagged("the classes of the loss have weights, by whose sum it is divided", True)
    if target.classes and operation.ignored < 0:
        return label
    if target.computed:
        return label.flagged("the loss is a mean over class numbers that follow from computed values", True)
    counted = target.counted and target.counted.other_than(operation.ignored)
    count, some = (counted.count, counted.some) if counted else (None, False)
    return label.divided(Divisor(target.places, ignored=operation.ignored, count=count, some=some))


def _rows_counted(name: str, chosen: Label) -> Counted | None:
    """How many rows lengths, or else truth values, choose."""
    counted = chosen.counted
    lengths = name == "_pack_padded_sequence"
    return counted if counted is not None and lengths == (counted.count.comparison == "sum") else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _over_rows(operation: Operation) -> bool:
    """Whether the rows are no longer there afterwards."""
    if operation.name in ("sum", "mean"):
        return 0 in operation.along
    return operation.reduction != 0 or operation.name in ("dot", "vdot")


def _pairs(one: Operand, other: Operand) -> bool:
    """Whether two dimensions grow as the samples do."""
    ratios = _growths(one.shape, other.shape)
    return len(ratios) > len(set(ratios))


def _growths(one: tuple[int, ...], other: tuple[int, ...]) -> list[Fraction]:
    """How much larger dimensions are with more samples, of those that are."""
    if len(one) != len(other):
        return []
    return [Fraction(long, short) for long, short in zip(one, other, strict=True) if long != short and short]
