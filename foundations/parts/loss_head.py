"""What a loss is made of, read off the operations that lead to it: means and sums over samples or labels, or else.

A step runs on a few samples and on fewer of them, and its operations are noted. From the loss they are followed back,
over sums of terms and constant factors, to where one entry for each sample becomes a number for all of them. There
stands a mean or a sum, or the loss is refused by the operation's name. Nothing is guessed from values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retime.foundations.parts.combine import COMPARED, OPPOSITE, Count, Weighting
from retime.foundations.parts.operations import SAME_VALUES, WRITTEN, Operation, RecordedRun, without_views
from retime.foundations.parts.split import loss_of

_COPIES = {"clone", "detach", "alias"}
_SOME_VALUES = {"select", "slice", "unbind", "split", "split_with_sizes", "narrow", "stack", "cat"}
_VALUES_LEFT_OUT = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros"}
_VALUES_LEFT_OUT |= {"new_ones", "new_full", "new_empty", "new_empty_strided"}
"""Operations that take a shape or a type of what they are given, and no value."""
_ORDERED = {"sort", "topk", "argsort", "kthvalue", "mode"}
"""Operations along the last dimension, where a call says nothing else."""
_FACTORS, _PRODUCTS = {"mul", "div"}, {"mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "matmul"}
_WINDOWS = ("avg_pool", "max_pool", "adaptive_", "_adaptive_", "upsample_", "_upsample_", "reflection_", "replic")
_EACH_ROW = {"arange", "repeat_interleave"}
"""What numbers samples by their places."""
_REDUCED = {
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss_forward"),
}
"""Losses of torch that are means or sums by their ``reduction``."""
_LABELLED = {"nll_loss_forward", "nll_loss2d_forward", "cross_entropy"}
_NEVER_NEGATIVE = {
    *("argmax", "argmin", "arange", "zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones", "bucketize"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "searchsorted", "remainder"),
    *("bitwise_not", "randint", "abs", "one_hot"),
}
"""What computes labels none of which is negative, as ``ignore_index`` mostly is; ``remainder`` by numbers above 0."""


class NotUnderstoodError(Exception):
    """A number is neither a mean nor a sum over samples or labels, as far as its operations tell."""


@dataclass(frozen=True)
class Head:
    """Way in which a number for a batch comes from samples.

    Attributes:
        weightings: of parts, which add up by each of them; none, if no sample has a part in it.
        like_loss: it is the loss, or follows from it over factors and terms that are constant.
        compares: what is counted follows from a comparison with a number of the step's own.
    """

    weightings: tuple[Weighting, ...]
    like_loss: bool = False
    compares: bool = False


def head_of(
    large: tuple[RecordedRun, Tensor],
    small: tuple[RecordedRun, Tensor],
    loss: tuple[Tensor, Tensor] | None = None,
    values: bool = True,
) -> Head:
    """Find the head of a number, as a step gave it for some samples and for fewer.

    Args:
        large: the run, and the number.
        small: likewise, of fewer samples.
        loss: of both, where another number may be a part of it.
        values: tensors have values; else a constant term counts for nothing, as a run with values has to show.

    Raises:
        NotUnderstoodError: it is neither a mean nor a sum over samples or labels.
    """
    judge = _Judge(large[0].samples, small[0].samples, values)
    of_large, of_small = large[0].recorder.operation_of, small[0].recorder.operation_of
    if loss is not None:
        judge.loss = of_large(loss[0]), of_small(loss[1])
    try:
        judge.follow(of_large(large[1]), of_small(small[1]), 1.0)
    except ZeroDivisionError as error:
        raise NotUnderstoodError("it is a mean over nothing for some samples") from error
    return judge.head()


def head_of_loss(large: RecordedRun, small: RecordedRun, altered: Iterable[RecordedRun | None]) -> Head:
    """Find the head of a step's loss, whatever values it reads.

    Args:
        large, small: runs on some samples and on fewer.
        altered: see :func:`record_altered`.

    Raises:
        NotUnderstoodError: it is neither a mean nor a sum over samples or labels.
    """
    fewer = small, loss_of(small.output)
    head = head_of((large, loss_of(large.output)), fewer)
    for other in altered:
        try:
            same = other is not None and head_of((other, loss_of(other.output)), fewer) == head
        except NotUnderstoodError:
            same = False
        if not same:
            raise NotUnderstoodError(
                "it depends on values of the batch that are read, as by .item(), by `if`, by how many entries "
                "nonzero() and its like give, or by len() of a text, what it is a mean over"
            )
    return head


class _Judge:
    def __init__(self, large: int, small: int, values: bool) -> None:
        self._grows, self._values = large / small, values
        self._weightings: dict[Weighting, Operation] = {}
        self._constant: Operation | None = None
        self._like_loss = self._compares = False
        self._scales: set[Operation] = set()
        self._constants: set[Operation] = set()
        self._masks: list[Count | None] = []  # of sums over samples
        self.loss: tuple[Operation, Operation] | None = None

    def head(self) -> Head:
        if self._like_loss and self._weightings:
            raise NotUnderstoodError("it adds something to the loss that counts otherwise")
        kinds = {one.kind for one in self._weightings}
        if "sum" in kinds and len(kinds) > 1:
            summed = next(operation for one, operation in self._weightings.items() if one.kind == "sum")
            raise NotUnderstoodError(f"it adds up a mean and a sum over samples, {summed}")
        if kinds == {"sum"} and self._constant is not None:
            raise NotUnderstoodError(
                f"it adds up a sum over samples and {self._constant}, which is the same for each micro-batch"
            )
        weightings = [one.exactly() if self._constant is not None else one for one in self._weightings]
        return Head(tuple(weightings), self._like_loss, self._compares)

    def follow(self, one: Operation, two: Operation, factor: float) -> None:
        """Go on towards the samples.

        Args:
            one, two: the same operation in the runs on more and on fewer samples.
            factor: by how much larger is what it is multiplied by in the first.
        """
        if self.loss is not None and (one, two) == self.loss and math.isclose(factor, 1, rel_tol=1e-6):
            self._like_loss = True
            return
        if one.name != two.name or ((one.varies or two.varies) and one.given.keys() != two.given.keys()):
            raise NotUnderstoodError(f"it takes other ways for other samples: {one} and {two}")
        if not one.varies:
            unread = not self._values and math.isnan(one.value)
            if not unread and (one.value or two.value or one.name in _PRODUCTS | _FACTORS):
                self._same_factor(one, factor * _ratio(one, two))  # what a sum begins with counts for nothing
                self._constant = one
            return
        name, given, other = one.name, one.given, two.given
        if name in ("mean", "sum"):
            self._reduced(one, two, factor)
        elif name in _LABELLED | _REDUCED:
            self._loss(one, two, factor)
        elif one.shape != two.shape:
            raise NotUnderstoodError(f"{one} gives other shapes for other numbers of samples")
        elif name in ("add", "sub", "rsub"):
            scaled = "self" if name == "rsub" else "other"
            for key in ("self", "other"):
                alpha = _ratio(given.get("alpha", 1), other.get("alpha", 1)) if key == scaled else 1.0
                self._term(one, given[key], other[key], factor * alpha)
        elif name == "neg":
            self.follow(given["self"], other["self"], factor)
        elif name in ("mul", "div"):
            self._scaled(one, two, factor)
        elif name in SAME_VALUES | _SOME_VALUES:
            self._passed_on(one, two, factor)
        elif name in ("dot", "vdot") and given["self"].shape != other["self"].shape:
            self._collapsed(one, two, factor)
        else:
            raise NotUnderstoodError(f"it goes through {one}")

    def _term(self, where: Operation, one: Any, two: Any, factor: float) -> None:
        if isinstance(one, Operation):
            self.follow(one, two, factor)
        elif one or two:  # a number
            if one != two:
                raise NotUnderstoodError(f"{where} adds a number that depends on the samples")
            self._same_factor(where, factor)
            self._constant = where

    def _scaled(self, one: Operation, two: Operation, factor: float) -> None:
        left, right = one.given["self"], one.given["other"]
        key = "other" if isinstance(right, Operation) and right.varies else "self"
        if one.name == "div" and key == "other":
            self._divided_by_count(one, two, factor)
            return
        if key == "other" and left.varies:
            raise NotUnderstoodError(f"{one} multiplies two values that are computed from the batch")
        if one.given.get("rounding_mode") is not None:
            raise NotUnderstoodError(f"it goes through {one}")
        scale = "self" if key == "other" else "other"
        ratio = _ratio(one.given[scale], two.given[scale])
        self.follow(one.given[key], two.given[key], factor * ratio if one.name == "mul" else factor / ratio)

    def _divided_by_count(self, one: Operation, two: Operation, factor: float) -> None:
        """Follow a sum over samples that is divided by what is counted in the batch."""
        count, compares = _counted(one.given["other"], one)
        terms, constant, masks = self._weightings, self._constant, self._masks
        self._weightings, self._constant, self._masks = {}, None, []
        self._term(one, one.given["self"], two.given["self"], 1.0)
        if {weighting.kind for weighting in self._weightings} != {"sum"} or self._constant is not None:
            raise NotUnderstoodError(f"{one} divides by {count} what is no sum over samples")
        masked = all(mask == replace(count, least=None, added=0) for mask in self._masks)
        self._weightings, self._constant, self._masks = terms, constant, masks
        self._counts(one, replace(count, needed=not (masked or count.least or count.added)), compares, factor)

    def _counts(self, one: Operation, count: Count, compares: bool, factor: float) -> None:
        self._same_factor(one, factor)
        self._compares |= compares
        self._weightings[Weighting("count", count)] = one

    def _passed_on(self, one: Operation, two: Operation, factor: float) -> None:
        for before, other in zip(one.operands(), two.operands(), strict=True):
            if before.shape != other.shape:
                raise NotUnderstoodError(f"{one} takes some of the samples")
            self.follow(before, other, factor)

    def _reduced(self, one: Operation, two: Operation, factor: float) -> None:
        before, other = one.given["self"], two.given["self"]
        rows, others = without_views(before), without_views(other)
        if rows.selects and rows.name in ("index", "masked_select") and rows.name == others.name:
            self._chosen(one, rows, others, factor)
            return
        if one.name == "mean":
            factor *= (_entries(other) / max(1, _entries(two))) / (_entries(before) / max(1, _entries(one)))
        if before.shape == other.shape:
            self.follow(before, other, factor)
        elif one.shape != two.shape:
            raise NotUnderstoodError(f"{one} gives other shapes for other numbers of samples")
        else:
            self._collapsed(one, two, factor)

    def _chosen(self, one: Operation, rows: Operation, others: Operation, factor: float) -> None:
        """Follow what a mask of the batch chooses, in a sum or in a mean over all that it chooses."""
        masks = rows.given.get("indices", [rows.given.get("mask")])
        whole = rows.given["self"]
        unclear = NotUnderstoodError(f"how many entries {one} has depends on values that {rows} chooses by")
        if one.shape or len(masks) != 1 or len(whole.shape) < len(masks[0].shape):
            raise unclear
        if one.name == "sum":
            self._collapsed(rows, others, factor)
            return
        try:
            self._counts(one, *_entries_of(masks[0]), factor)
        except LookupError as error:
            raise unclear from error
        self._check_inside(rows, others)

    def _loss(self, one: Operation, two: Operation, factor: float) -> None:
        given, other = one.given, two.given
        if any(given.get(key) != other.get(key) for key in ("reduction", "ignore_index")):
            raise NotUnderstoodError(f"{one} has other settings for other numbers of samples")
        reduction = given.get("reduction", 1)  # a mean, where the call leaves it out
        if reduction == 0:
            raise NotUnderstoodError(f"{one} gives other shapes for other numbers of samples")
        if reduction == 1 and one.name in _REDUCED:
            factor *= _entries(other["self"]) / _entries(given["self"])
        if reduction == 2 or one.name in _REDUCED:
            self._collapsed(one, two, factor)
            return
        if given.get("weight") is not None:
            raise NotUnderstoodError(f"{one} is a mean by class weights")
        label = given["target"]
        if _never(label, given["ignore_index"]):
            self._collapsed(one, two, factor * _entries(other["target"]) / _entries(label))
            return
        self._same_factor(one, factor)
        self._check_inside(one, two)
        self._weightings[Weighting("count", _count(label, given["ignore_index"]))] = one

    def _collapsed(self, one: Operation, two: Operation, factor: float) -> None:
        """Here samples become one number: a sum over them, or a mean."""
        inner, other = one.given.get("self"), two.given.get("self")
        while one.name in ("sum", "mean") and isinstance(inner, Operation) and isinstance(other, Operation):
            inner, other = without_views(inner), without_views(other)
            by, of = inner.given.get("other"), other.given.get("other")
            if inner.name not in _FACTORS or inner.name != other.name or not _is_number(by) or not _is_number(of):
                break
            ratio = _ratio(by, of)
            factor = factor * ratio if inner.name == "mul" else factor / ratio
            self._scales.add(inner)
            inner, other = inner.given["self"], other.given["self"]
        if math.isclose(factor, 1, rel_tol=1e-6):
            kind = Weighting("sum")
        elif math.isclose(factor * self._grows, 1, rel_tol=1e-6):
            kind = Weighting("mean")
        else:
            raise NotUnderstoodError(
                f"{one} is divided by a number that is neither the same for all batches nor grows with the samples"
            )
        self._check_inside(one, two)
        self._weightings.setdefault(kind, one)
        self._masks.append(_mask_of(one))

    def _check_inside(self, one: Operation, two: Operation) -> None:
        """Raise where samples influence one another, or values decide how many there are, from the layers to here."""
        waiting = [*self._operands(one, two)]
        seen: set[tuple[Operation, Operation]] = set()
        mixing = None
        while waiting:
            pair = waiting.pop()
            large, small = pair
            if pair in seen or large.edge or not large.varies or large.name in _VALUES_LEFT_OUT:
                continue
            seen.add(pair)
            if large.selects:
                raise NotUnderstoodError(f"how many entries {one} has depends on values that {large} chooses by")
            waiting += self._operands(large, small)
            mixing = large if self._mixes_any(large, small) else mixing
        if mixing is not None:
            raise NotUnderstoodError(f"samples of a batch influence one another in {mixing}, which {one} takes in")

    def _operands(self, one: Operation, two: Operation) -> Iterator[tuple[Operation, Operation]]:
        """Pairs of operands that both were given; shapes aside, which one sample may leave out."""
        given, other = (
            [without_views(operand) for operand in operation.operands() if operand.varies] for operation in (one, two)
        )
        if [operation.name for operation in given] != [operation.name for operation in other]:
            raise NotUnderstoodError(f"{one} is computed in other ways for other samples")
        if one.name not in SAME_VALUES | _SOME_VALUES | {WRITTEN} and one not in self._scales:
            for key, value in one.given.items():
                there = two.given.get(key)
                if isinstance(value, Operation) and isinstance(there, Operation):
                    self._check_constant(one, value, there)
                self._check_number(one, value, there)
        return zip(given, other, strict=True)

    def _check_number(self, where: Operation, one: Any, two: Any) -> None:
        """Raise where an operation is given a number that is another for other samples, and not their number."""
        if not isinstance(one, int | float) or one == two or one != one:
            return
        if not isinstance(one, int) or where.name in _FACTORS or not math.isclose(one, (two or 0) * self._grows):
            raise NotUnderstoodError(f"{where} is given {one!r}, and {two!r} for other samples")

    def _check_constant(self, where: Operation, one: Operation, two: Operation) -> None:
        """Raise where what follows from no sample is another for other samples; drawn at random, it may be."""
        waiting = [(one, two)]
        while waiting:
            one, two = waiting.pop()
            if one in self._constants or one.varies or two.varies:
                continue
            self._constants.add(one)
            near = math.isnan(one.value + two.value) or math.isclose(one.value, two.value, rel_tol=1e-6)
            if one.name == two.name and one.shape == two.shape and not near:
                raise NotUnderstoodError(f"{where} is given another constant for other samples")
            by_place = one.name in COMPARED and not _EACH_ROW.isdisjoint(without_views(x).name for x in one.operands())
            if by_place and one.shape != two.shape:
                raise NotUnderstoodError(f"{where} depends on where in the batch a sample is")
            for key, value in one.given.items():
                self._check_number(where, value, two.given.get(key))
            waiting += zip(one.operands(), two.operands(), strict=False)

    def _mixes_any(self, one: Operation, two: Operation) -> bool:
        """Return whether a sample's entries of a result may follow from another sample's."""
        varying = ([operand for operand in operation.operands() if operand.varies] for operation in (one, two))
        pairs = zip(*varying, strict=True)
        return one.name != WRITTEN and any(self._mixes(one, two, given, other) for given, other in pairs)

    def _mixes(self, one: Operation, two: Operation, given: Operation, other: Operation) -> bool:
        axes = _unlike(given, other)
        if not axes:
            return False
        kept = _unlike(one, two)
        if len(kept) != 1 or len(axes) != 1:
            return True
        if not math.isclose(one.shape[kept[0]], two.shape[kept[0]] * self._grows):
            return True  # it is not as long as the number of samples, or a multiple
        axis, dimensions = axes[0], len(given.shape)
        if one.name == "slice" and one.given.get("dim", 0) % dimensions == axis:
            starts = [operation.given.get("start") or 0 for operation in (one, two)]
            return not math.isclose(starts[0], starts[1] * self._grows)
        if one.name in SAME_VALUES | _SOME_VALUES:
            return False
        if one.name in ("index", "index_put", "_unsafe_index") and given is one.given["self"]:
            if one.given.get("by_mask") and one.name == "index_put":
                return False  # writes where the mask is, entry by entry
            number = (list(one.given["indices"]) + [None] * dimensions)[axis]
            return number is not None and without_views(number).name not in _EACH_ROW
        if one.name in ("index_select", "index_add") and without_views(one.given["index"]).name in _EACH_ROW:
            return False
        if one.name in _PRODUCTS:
            left, right = [operand for operand in one.operands() if len(operand.shape)][-2:]
            return given in (left, right) and axis == dimensions - (2 if given is right and len(right.shape) > 1 else 1)
        if one.name == "convolution" or "batch_norm" in one.name or one.name.startswith("linalg_"):
            return axis > 0 or bool(one.given.get("training"))
        if one.name.startswith(_WINDOWS) or "scaled_dot_product" in one.name:
            return axis == dimensions - 2 if "scaled_dot_product" in one.name else axis > 1
        if one.name == "native_layer_norm":
            return axis >= dimensions - len(one.given["normalized_shape"])
        if one.name in ("masked_scatter", "take", "unfold", "as_strided") or (
            one.name == "embedding" and (given is one.given["weight"] or one.given.get("scale_grad_by_freq"))
        ):
            return True
        along = one.given.get("dim", one.given.get("dims", -1 if one.name in _ORDERED else ()))
        along = along if isinstance(along, list | tuple) else (along,)
        return (one.name == "roll" and not along) or any(number % dimensions == axis for number in along)

    def _same_factor(self, one: Operation, factor: float) -> None:
        if not math.isclose(factor, 1, rel_tol=1e-6):
            raise NotUnderstoodError(f"{one} is multiplied by a number that depends on how many samples there are")


def _unlike(one: Operation, two: Operation) -> list[int]:
    """The dimensions that are not equally long for more samples and for fewer; all, where there are not as many."""
    if len(one.shape) != len(two.shape):
        return list(range(max(len(one.shape), len(two.shape))))
    return [axis for axis, lengths in enumerate(zip(one.shape, two.shape, strict=True)) if lengths[0] != lengths[1]]


def _ratio(one: Any, two: Any) -> float:
    values = [_known_value(one), _known_value(two)]
    if any(map(math.isnan, values)) or values[0] == values[1]:
        return 1.0
    if not all(values):
        raise NotUnderstoodError("a term of it is multiplied by 0 for some numbers of samples only")
    return values[0] / values[1]


def _known_value(constant: Operation | float) -> float:
    """Value of a constant; of one without, what is added to it, as numbers of samples are to metrics' counts."""
    if not isinstance(constant, Operation):
        return abs(float(constant))
    added = without_views(constant)
    more = added.given.get("other")
    if math.isnan(constant.value) and added.name == "add" and isinstance(more, int | float):
        before = _known_value(added.given["self"])
        return (0.0 if math.isnan(before) else before) + abs(more)
    return constant.value


def _entries(operation: Operation) -> int:
    return math.prod(operation.shape)


def _never(label: Operation, ignored: int) -> bool:
    """Return whether labels are computed so that none can be the ignored one."""
    while label.name in ("_to_copy", "clone", "detach", "view", "_unsafe_view", "squeeze", "unsqueeze", "alias"):
        label = label.given["self"]
    if label.name == "remainder":
        by = label.given["other"]
        return ignored < 0 and not isinstance(by, Operation) and by > 0
    return ignored < 0 and label.name in _NEVER_NEGATIVE


def _is_number(value: Any) -> bool:
    if isinstance(value, Operation):
        return not value.varies and _entries(value) == 1
    return isinstance(value, int | float)


def _count(label: Operation, ignored: int) -> Count:
    """Labels that a loss takes from the batch as they are there.

    Raises:
        NotUnderstoodError: they are computed.
    """
    last, cut = _taken(label, ignored)
    if last.place:
        return Count(last.place, "!=", ignored, cut)
    what = f"computed by {last}" if last.name not in ("constant", "batch") else "not in the batch"
    raise NotUnderstoodError(
        f"{label if last.name == 'batch' else last} gives the labels of a mean that leaves out label {ignored}, and "
        f"they are {what}: how many there are is not known"
    )


def _taken(given: Operation, filled: int | None = None) -> tuple[Operation, tuple[tuple[str, tuple[int, ...]], ...]]:
    """A tensor of the batch that another is, and what is cut off; what it is computed by, if it is none."""
    cut: list[tuple[str, tuple[int, ...]]] = []
    while given.name != "batch":
        before = given.given.get("self")
        if given.name in ("select", "slice"):
            numbers = _cut(given)
            if numbers is None:
                break
            cut.append((given.name, numbers))
        elif given.name == "constant_pad_nd":
            pad = given.given["pad"]
            by_end = min(pad) < 0 or any(name == "select" or min(numbers[1:3]) < 0 for name, numbers in cut)
            if given.given.get("value", 0) != filled or any(pad[2:]) or pad[0] or by_end:
                break
        elif given.name in ("view", "_unsafe_view", "squeeze", "unsqueeze", "permute", "transpose", "t"):
            if cut:
                break  # of another shape than in the batch
        elif given.name not in _COPIES | {"_to_copy", "expand"}:
            break
        if not isinstance(before, Operation):
            break
        given = before
    return given, tuple(reversed(cut))


def _counted(number: Operation, where: Operation) -> tuple[Count, bool]:
    """Find what a number counts in the batch: entries of a mask, or that compare so, or a sum of weights.

    Returns:
        The count, and whether the step compares entries with a number of its own.

    Raises:
        NotUnderstoodError: it is computed in another way.
    """
    given, least, added = number, None, 0.0
    while given.name != "sum" and "self" in given.given:
        lowest, more = given.given.get("min"), given.given.get("other")
        if given.name in ("clamp", "clamp_min") and given.given.get("max") is None and not added and least is None:
            if not isinstance(lowest, int | float) or lowest < 0:
                break
            least = lowest
        elif given.name == "add" and isinstance(more, int | float) and more >= 0 and not added and least is None:
            added = more * given.given.get("alpha", 1)
        elif given.name not in SAME_VALUES:
            break
        given = given.given["self"]
    while without_views(given).name == "sum":
        given = without_views(given).given["self"]
    try:
        if _entries(number) == 1 and given is not number:
            count, compares = _entries_of(given, summed=True)
            return replace(count, least=least, added=added), compares
    except LookupError:
        pass
    raise NotUnderstoodError(f"{where} divides by what is computed from the batch, and is no count of what is in it")


def _mask_of(summed: Operation) -> Count | None:
    """Mask that a sum over samples leaves entries out by, or multiplies them by; None where it is not in the batch."""
    inner = summed.given.get("self")
    product = without_views(inner) if summed.name == "sum" and isinstance(inner, Operation) else summed
    factors = {"mul": product.operands(), "index": product.given.get("indices", ())}
    factors |= {"masked_select": [product.given.get("mask")]}
    for factor in factors.get(product.name, ()):
        with suppress(LookupError):
            return _entries_of(factor, summed=product.name == "mul")[0]
    return None


def _entries_of(mask: Operation, summed: bool = False) -> tuple[Count, bool]:
    """The entries that a mask has, or the sum of what is none.

    Returns:
        The count, and whether the step compares entries with a number of its own.

    Raises:
        LookupError: it is computed in another way.
    """
    comparison, value, opposite, truncated = "", 0.0, False, False
    cut: list[tuple[str, tuple[int, ...]]] = []
    while mask.name != "batch":
        other, dtype = mask.given.get("other"), mask.given.get("dtype")
        if mask.name in ("logical_not", "bitwise_not") and not comparison:
            opposite = not opposite
        elif mask.name in COMPARED and not comparison and isinstance(other, int | float):
            comparison, value = COMPARED[mask.name], float(other)
        elif mask.name == "_to_copy" and dtype is torch.bool and not comparison:
            comparison = "!="
        elif mask.name in ("select", "slice") and (numbers := _cut(mask)) is not None:
            cut.append((mask.name, numbers))
        elif mask.name == "_to_copy":
            truncated |= dtype is not None and not dtype.is_floating_point
        elif mask.name not in SAME_VALUES - {"expand", "copy"} or (cut and mask.name not in _COPIES):
            raise LookupError
        mask = mask.given.get("self")  # type: ignore[assignment]
        if not isinstance(mask, Operation):
            raise LookupError
    if not mask.place or (mask.floating and (comparison or truncated)) or (opposite and not (comparison or mask.truth)):
        raise LookupError
    compares = bool(comparison)
    if mask.truth and not comparison:
        comparison, value, opposite = "==", 0.0 if opposite else 1.0, False
    if not comparison and not summed:
        raise LookupError
    name = OPPOSITE[comparison] if opposite else comparison or "sum"
    return Count(mask.place, name, value, tuple(reversed(cut))), compares


def _cut(operation: Operation) -> tuple[int, ...] | None:
    given, before = operation.given, operation.given["self"]
    dimension = given.get("dim", 0) % len(before.shape)
    if not dimension:
        return None if operation.name == "select" or operation.shape != before.shape else (0, 0, sys.maxsize, 1)
    if operation.name == "select":
        return dimension, given["index"]
    start, stop, step = given.get("start") or 0, given.get("end"), given.get("step", 1)
    stop = sys.maxsize if stop is None or stop >= before.shape[dimension] else stop
    return (dimension, start, stop, step) if stop < 0 or stop == sys.maxsize else None
