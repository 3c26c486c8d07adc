"""What flows into a loss from more than one sample: recorded while a step runs, judged by comparing two runs.

Gradients of a few samples cannot show what only other samples would: a mean over chosen samples looks like a sum where
one is chosen, and like a mean over all where all are. So the operations are recorded. Those that ran on a whole and on
a part of it are the same; a tensor that has the same shape in both, though it comes from samples, was collapsed over
them. From there to the loss everything has to be linear, but for counts of what is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from retime.foundations.parts import COMPARED, Count, compares, tensors_of
from retime.foundations.storages import has_storage, tensors_in
from retime.foundations.torch_private import DataDependentOutputException, FakeTensor, schema_of, storage_address

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "read"}
"""Operations that hand a tensor's value to Python; under ``inference_mode`` they come as they were called."""
_SORTED_ALONG = {"sort", "argsort", "topk", "kthvalue", "median", "mode", "flip", "roll", "gather", "index_select"}
_SUMMED_ALONG = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "_softmax", "_log_softmax"}
_TRANSFORMED_ALONG = {"_fft_r2c", "_fft_c2c", "_fft_c2r"}
_ALONG = _SORTED_ALONG | _SUMMED_ALONG | _TRANSFORMED_ALONG | {"sum", "mean"}
_WINDOWS = (
    "conv",
    "avg_pool",
    "max_pool",
    "adaptive_",
    "_adaptive_",
    "upsample_",
    "_upsample_",
    "reflection_",
    "replic",
)


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation reads or gives: the number of its storage, and its shape.

    Attributes:
        covers: of the entries in its storage ``"all"``, or ``"all but first"`` of each row, or else ``""``.
        learns: a gradient flows through it.
    """

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    covers: str = ""
    learns: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation of a step.

    Attributes:
        name: without its overload; of one in place without the underscore.
        reads, writes: tensors.
        view: what it gives is a window on what it reads.
        random: it drew random numbers.
        chosen: positions among ``reads`` of what chooses how many rows there are in what it writes.
        along: the dimensions of its first operand that it runs along, where that matters.
        numbers: those among its operands.
        divisor: what it divides or multiplies by, if that is one number in a tensor; NaN otherwise.
        scale: position among ``reads`` of that number; -1: there is none.
        order: position among ``reads`` of numbers by which it takes or writes rows in another order; -1: none.
        reduction: of a loss: 0 none, 1 a mean, 2 a sum.
        target: position among ``reads`` of a loss's class numbers; -1: there are none.
        ignored: the class number that counts for nothing.
        weighed: the classes of a loss have weights.
        counting: its gradient counts how often each class is in the batch.
        floor: the number below which it gives nothing, if all others stay as they are; infinite otherwise.
        pad: how many entries it adds at each end.
        constants: all numbers that it is given, those in lists too.
        pointwise: what it gives for an entry depends on that entry alone.
    """

    name: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    view: bool = False
    random: bool = False
    chosen: tuple[int, ...] = ()
    along: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    divisor: float = math.nan
    scale: int = -1
    order: int = -1
    reduction: int = 0
    target: int = -1
    ignored: int = -100
    weighed: bool = False
    counting: bool = False
    floor: float = math.inf
    pad: tuple[int, ...] = ()
    constants: tuple[float, ...] = ()
    pointwise: bool = False


@dataclass(frozen=True)
class Place:
    """A tensor of the batch: its name, such as ``batch['labels']``, its shape, the sum of its entries, and its type."""

    name: str
    shape: tuple[int, ...]
    total: complex
    dtype: torch.dtype

    def same_as(self, other: Place) -> bool:
        """Whether a part of the batch has the same there."""
        return self.shape == other.shape and self.total == other.total


@dataclass
class Flow:
    """The operations of one run of a step.

    Attributes:
        operations: in order.
        places: of the batch's tensors, by the number of their storage.
        fresh: storages of constants that the step itself made.
        loss: the number of the loss's storage; -1 before :meth:`end`.
        recording: False from the end of the forward pass on.
    """

    operations: list[Operation] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    loss: int = -1
    recording: bool = True
    _held: list[Any] = field(default_factory=list)  # so that no other storage gets the same number

    def begin(self, batch: Any) -> None:
        """Note what is in the batch."""
        named = {id(tensor): name for name, tensor in tensors_of(batch).items()}
        for position, tensor in enumerate(tensors_in(batch)):
            name = named.get(id(tensor), f"tensor {position} of the batch")
            total = complex(tensor.detach().sum(dtype=None if tensor.is_floating_point() else torch.float32))
            self.places[self.number_of(tensor)] = Place(name, tuple(tensor.shape), total, tensor.dtype)

    def names(self) -> list[str]:
        """Return the operations' names."""
        return [operation.name for operation in self.operations]

    def towards_loss(self) -> list[Operation]:
        """The operations that the loss follows from."""
        wanted, found = {self.loss}, []
        for operation in reversed(self.operations):
            if not operation.view and any(one.storage in wanted for one in operation.writes):
                wanted.update(one.storage for one in operation.reads)
                found.append(operation)
        return found[::-1]

    def read(self, tensor: Tensor) -> None:
        """A tensor's values are handed to Python without an operation."""
        if self.recording:
            self.operations.append(Operation("read", (self._operand(tensor),), ()))

    def drawn(self, tensor: Tensor) -> Tensor:
        """The same values, as if entries had been left out at random."""
        made = tensor.clone()
        if self.recording:
            found = (self._operand(made),)
            self.operations.append(Operation("dropout", found, found, random=True))
        return made

    def end(self, loss: Tensor) -> None:
        """The forward pass is over."""
        self.loss, self.recording = self.number_of(loss), False

    def release(self) -> None:
        """Numbers of storages are given out anew from now on."""
        self._held.clear()

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, random: bool) -> None:
        """One operation has run."""
        if not self.recording:
            return
        given = _named(func, args, kwargs)
        tensors = list(_tensors(given.values()))
        reads = tuple(map(self._operand, tensors))
        name = str(schema_of(func).name).partition("::")[2]
        mutable = schema_of(func).is_mutable
        results = [result] if result is not None else []
        written = [value for value, one in zip(args, schema_of(func).arguments, strict=False) if _written(one)]
        writes = tuple(map(self._operand, _tensors([*results, *written])))
        if name == "lift_fresh":
            self.fresh.update(one.storage for one in writes)
        numbers_read = {one.storage for one in reads}
        reduction, target, ignored, weighed = _loss(name, given, tensors)
        scale = _scale(name.removesuffix("_"), tensors)
        self.operations.append(
            Operation(
                name.removesuffix("_") if mutable else name,
                reads,
                writes,
                not mutable and any(one.storage in numbers_read for one in writes),
                random,
                _choosing(func, name, tensors),
                _along(name, given, reads),
                tuple(value for key, value in given.items() if isinstance(value, int | float) and key != "alpha"),
                _number(tensors[scale]) if scale >= 0 else math.nan,
                scale,
                _order(name, given, tensors),
                reduction,
                target,
                ignored,
                weighed,
                bool(given.get("scale_grad_by_freq")),
                _floor(given),
                tuple(given["pad"]) if "pad" in given else (),
                tuple(_numbers(given.values())),
                torch.Tag.pointwise in func.tags,
            )
        )

    def _operand(self, tensor: Tensor) -> Operand:
        return Operand(self.number_of(tensor), tuple(tensor.shape), tensor.dtype, _covers(tensor), tensor.requires_grad)

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of its storage, which no other gets before :meth:`release`."""
        if has_storage(tensor):
            storage = tensor.untyped_storage()
            self._held.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            return int(storage_address(storage))
        self._held.append(tensor)
        return id(tensor)


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in schema_of(func).arguments]
    defaults = {one.name: one.default_value for one in schema_of(func).arguments if one.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _covers(tensor: Tensor) -> str:
    if not has_storage(tensor):
        return ""
    entries, first = tensor.untyped_storage().nbytes() // tensor.element_size(), tensor.storage_offset()
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not first and tensor.numel() == entries and _dense(shape, strides):
        return "all"
    if len(shape) < 2 or first != math.prod(shape[2:]) or entries != shape[0] * (shape[1] + 1) * first:
        return ""
    rows = strides[0] == (shape[1] + 1) * first and strides[1] == first
    return "all but first" if rows and _dense(shape[2:], strides[2:]) else ""


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each place in memory is one entry's."""
    following = 1
    for stride, length in sorted((stride, length) for stride, length in zip(strides, shape, strict=True) if length > 1):
        if stride != following:
            return False
        following *= length
    return True


def _floor(given: dict[str, Any]) -> float:
    lowest = given.get("min")
    return float(lowest) if isinstance(lowest, int | float) and given.get("max") is None else math.inf


def _choosing(func: Any, name: str, tensors: list[Tensor]) -> tuple[int, ...]:
    """Which operands choose rows, where how many there are depends on values."""
    if name == "index":
        return tuple(at for at, one in enumerate(tensors) if at and one.dtype in (torch.bool, torch.uint8))
    if name == "masked_select":
        return (1,)
    if name == "_pack_padded_sequence":
        return (1,)
    return tuple(range(len(tensors))) if torch.Tag.dynamic_output_shape in func.tags else ()


def _scale(name: str, tensors: list[Tensor]) -> int:
    """Which operand is a number that others are divided or multiplied by; see :class:`Operation`."""
    if name not in ("mul", "div") or len(tensors) < 2:
        return -1
    places = (1,) if name == "div" else (1, 0)
    found = (at for at in places if tensors[at].numel() == 1 and not tensors[at].is_complex())
    return next((at for at in found if name == "div" or not tensors[at].requires_grad), -1)


def _number(tensor: Tensor) -> float:
    """NaN where it has no value."""
    try:
        return float(tensor.detach())
    except DataDependentOutputException:
        return math.nan


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if isinstance(value, int | float):
            yield value
        elif isinstance(value, list | tuple):
            yield from _numbers(value)


def _order(name: str, given: dict[str, Any], tensors: list[Tensor]) -> int:
    chooser = "index" if name.startswith("index_copy") else "indices" if name.startswith("index") else ""
    rows = given.get(chooser)
    rows = rows[0] if isinstance(rows, list | tuple) else rows
    if not isinstance(rows, Tensor) or rows.dtype in (torch.bool, torch.uint8):
        return -1
    if isinstance(rows, FakeTensor):
        return -1
    if rows.dim() and bool((rows.movedim(0, -1) == torch.arange(len(rows), device=rows.device)).all()):
        return -1
    return next(at for at, one in enumerate(tensors) if one is rows)


def _along(name: str, given: dict[str, Any], reads: tuple[Operand, ...]) -> tuple[int, ...]:
    if not reads:
        return ()
    rank = len(reads[0].shape)
    if name.startswith(_WINDOWS):
        return tuple(range(2, rank))
    if "scaled_dot_product" in name:
        return (rank - 2,)
    if "layer_norm" in name and "normalized_shape" in given:
        return tuple(range(rank - len(given["normalized_shape"]), rank))
    if "batch_norm" in name and given.get("training", given.get("train", True)):
        return tuple(dim for dim in range(rank) if dim != 1)
    if "linalg_" in name and "vector_norm" not in name:
        return tuple(range(rank))[-2:]
    if name.removesuffix("_") not in _ALONG:
        return ()
    dims = given.get("dim", given.get("dims"))
    if dims is None:
        return tuple(range(rank))
    return tuple(dim % max(1, rank) for dim in (dims if isinstance(dims, list | tuple) else [dims])) or tuple(
        range(rank)
    )


def _loss(name: str, given: dict[str, Any], tensors: list[Tensor]) -> tuple[int, int, int, bool]:
    """Reduction, target, ignored class and whether classes have weights; see :class:`Operation`."""
    if "reduction" not in given:
        return 0, -1, -100, False
    reduction = int(given["reduction"])
    if not name.startswith("nll_loss"):
        return reduction, -1, -100, False
    target = next(at for at, one in enumerate(tensors) if one is given["target"])
    return reduction, target, int(given["ignore_index"]), given["weight"] is not None


# What a tensor counts in the batch: followed operation by operation, so that it holds for any values.
#
# A mask that is the batch's own, or a comparison of the batch's entries with a number, counts what the loss is a mean
# over. A product of two masks, a mask made of lengths, or class numbers into which others were written may agree with
# such a count on the samples that are probed, and not on others.

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


# What is known of a tensor's values while the flow of a step is followed.


@dataclass(frozen=True)
class Divisor:
    """What a loss is divided by, or what chooses what it is a mean over: it comes from these places of the batch.

    Attributes:
        ratio: its value in the part over that in the whole; NaN where it is not known.
        ignored: it counts class numbers that are not this one.
        count: what it counts there, whatever the values are; None where it is something else.
        some: the class numbers are some of those entries only.
    """

    places: frozenset[str]
    ratio: float = math.nan
    ignored: int | None = None
    count: Count | None = None
    some: bool = False


@dataclass(frozen=True)
class Label:
    """What is known of a storage's values.

    Attributes:
        sampled: they depend on samples.
        computed: on more than the batch: on parameters, on what modules hold, on random numbers.
        places: of the batch.
        grows: there are more of them where there are more samples.
        rows: how many there are depends on these values.
        cut: they are sums over such rows.
        classes: they are no less than 0.
        sums, means: they contain sums, or means, over samples that nothing is divided by.
        constant: they contain what does not depend on samples, beside what was taken over them.
        scaled: they are divided by how many samples there are, one by one.
        reason: why what follows from them may not add up from parts; empty where it does.
        weights: the reason is a count that nobody can know before; someone who gives it can rule it out.
        divisors: that they contain.
        counted: what they count in the batch.
    """

    sampled: bool = False
    computed: bool = False
    places: frozenset[str] = frozenset()
    grows: bool = False
    rows: Label | None = None
    cut: Label | None = None
    classes: bool = False
    sums: bool = False
    means: bool = False
    reason: str = ""
    weights: bool = False
    divisors: frozenset[Divisor] = frozenset()
    counted: Counted | None = None
    constant: bool = False
    scaled: bool = False

    def flagged(self, reason: str, weights: bool = False) -> Label:
        """The first reason stays, but one that somebody can rule out makes way for one that nobody can."""
        if self.reason and (weights or not self.weights):
            return self
        return replace(self, reason=reason, weights=weights)

    def joined(self, other: Label) -> Label:
        """Return the label of values that follow from both."""
        worse = other if other.reason and (not self.reason or (self.weights and not other.weights)) else self
        return Label(
            self.sampled or other.sampled,
            self.computed or other.computed,
            self.places | other.places,
            self.grows or other.grows,
            either(self.rows, other.rows),
            either(self.cut, other.cut),
            self.classes and other.classes,
            self.sums or other.sums,
            self.means or other.means,
            worse.reason,
            worse.weights,
            self.divisors | other.divisors,
            self.counted if self.counted == other.counted else None,
            self.constant or other.constant,
            self.scaled or other.scaled,
        )

    def divided(self, divisor: Divisor) -> Label:
        """The same, divided by more."""
        return replace(self, sums=False, means=False, divisors=self.divisors | {divisor})

    def shared(self, growth: float, grown: bool) -> Label:
        """Multiplied by a number that is so many times as large where there are more samples.

        Args:
            growth: 1 where it is divided by how many samples there are, -1 where it is multiplied by that.
            grown: they are the values of samples.
        """
        if grown and growth == 1 and not self.scaled:
            return replace(self, scaled=True)
        if not grown and not self.constant and not self.divisors:
            if growth == 1 and self.sums and not self.means:
                return replace(self, sums=False, means=True)
            if growth == -1 and self.means and not self.sums:
                return replace(self, sums=True, means=False)
        return self.flagged("it is multiplied or divided by a number that follows from how many samples there are")

    def by_chosen(self, rows: Label, ratio: float) -> Label:
        """A mean over rows that were chosen so, of which a part has so much of the whole."""
        if rows.computed:
            return self.flagged("the loss is a mean over samples that are chosen by computed values", True)
        return self.divided(Divisor(rows.places, ratio, count=rows.counted.exactly if rows.counted else None))

    def settled(self, ratio: float = math.nan) -> Label:
        """After a mean over its rows."""
        return self if self.rows is None else replace(self.by_chosen(self.rows, ratio), rows=None)


def either(one: Label | None, two: Label | None) -> Label | None:
    """Both, where there are two."""
    return one if two is None else two if one is None else one.joined(two)
