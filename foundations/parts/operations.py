"""The operations of a step on a batch, and the values that it reads, noted one by one or with others in their place."""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from dis import opmap
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from retime.foundations.messages import is_library
from retime.foundations.parts.split import map_leaves, replaced_tensors, samples_in, tensors_of
from retime.foundations.storages import has_storage, tensors_in
from retime.foundations.torch_private.engine import (
    DataDependentOutputException,
    FakeTensor,
    TorchDispatchMode,
    schema_of,
    tree_leaves,
    tree_map,
)
from retime.foundations.torch_private.tensors import storage_address

SAME_VALUES = {
    *("view", "_unsafe_view", "_reshape_alias", "reshape", "squeeze", "unsqueeze", "clone", "_to_copy", "detach"),
    *("alias", "lift_fresh", "permute", "transpose", "t", "expand", "copy", "view_as_real", "real"),
}
"""Operations that give the values that they are given, in another shape or type."""
_NOTHING = {"zeros", "zeros_like", "new_zeros"}
READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
_READ_WHOLE = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
WRITTEN = "a write into a part of a tensor"
_SIGNED = 4096
"""So many entries of a constant are read to compare it between two runs."""
_MORE = 3
_SHOWN = 64
"""What gives no more entries than these may be named in an error, with its line."""
_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


# Other values for those that a step reads, or that modules give: what is true of a step is true with them too.

Alteration = Literal["other", "low", "high", "zero"]
_FAR = 1e9
_SHORTCUTS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""Modules that read whether a mask masks anything, and leave it out where it does not: that changes no result."""
_CALLERS = 24  # torch's own are in between


@dataclass
class PerturbedReads:
    """Stands in for the values that a step reads.

    Args:
        which: positions among all reads of those that are altered, and all that follow the last of them.
        how: ``"other"``: the other truth value, and a number that is one larger; ``"low"`` and ``"high"``: false or
            true, and a number far from any; ``"zero"``: false or 0, so that what is counted is another number.
    """

    which: Container[int]
    last: int
    how: Alteration
    _position: int = -1
    _refused: BaseException | None = None

    @contextmanager
    def within_operation(self) -> Iterator[None]:
        """Around an operation of torch: one that raises an error after it has read a value has checked it."""
        before = self._position
        try:
            yield
        except Exception as error:
            if self._position > before:
                self._refused = error
            raise

    def checked(self, error: BaseException) -> bool:
        """Return whether the step raised this because it checks values; otherwise it could not run on what it read."""
        return error is self._refused or _raised_by_step(error)

    def instead_of(self, value: Any) -> Any:
        """Value that the next read gives."""
        self._position += 1
        if (self._position not in self.which and self._position <= self.last) or _in_shortcut():
            return value
        return self._changed(value)

    def _changed(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._changed(one) for one in value]
        if isinstance(value, bool):
            return not value if self.how == "other" else self.how == "high"
        if isinstance(value, int):
            return {"other": value + 1, "low": 0, "high": value + 1000, "zero": 0}[self.how]
        if isinstance(value, float):
            return {"other": value + 1, "low": -_FAR, "high": _FAR, "zero": 0.0}[self.how]
        if hasattr(value, "dtype") and hasattr(value, "copy"):  # an array of NumPy
            if self.how == "zero":
                return value * 0
            return ~value if value.dtype == bool else value + {"other": 1, "low": -1000, "high": 1000}[self.how]
        return value


def _in_shortcut() -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") in _SHORTCUTS:
            return True
        frame = frame.f_back
    return False


def _raised_by_step(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code: types.CodeType = trace.tb_frame.f_code
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    raised = code.co_code[trace.tb_lasti] in (opmap["RAISE_VARARGS"], opmap.get("RERAISE"))
    return raised and (module.partition(".")[0] != "torch" or module.startswith("torch.distributions"))


@dataclass(eq=False)
class Operation:
    """One result of an operation, or what a step began with.

    Attributes:
        name: without overload and underscore; ``"constant"`` and ``"batch"`` for what no operation gave.
        given: what the operation was given, by name: operations in the place of tensors.
        varies: follows from samples.
        value: of a constant: the sum of its absolute values; NaN where it was not read, or is drawn at random.
        selects: how many entries there are depends on values.
        where: the user's line that ran it; empty if it is none.
        place: of a tensor in the batch.
        floating, truth: of a tensor in the batch: its entries are no whole numbers, or are true or false.
        edge: a layer returned it.
    """

    name: str
    given: dict[str, Any] = field(default_factory=dict, repr=False)
    shape: tuple[int, ...] = ()
    varies: bool = False
    value: float = math.nan
    selects: bool = False
    where: str = ""
    place: str = ""
    floating: bool = False
    truth: bool = False
    edge: bool = False

    def operands(self) -> Iterator[Operation]:
        """The tensors among what it was given."""
        for value in self.given.values():
            if isinstance(value, Operation):
                yield value
            elif isinstance(value, list | tuple):
                yield from (one for one in value if isinstance(one, Operation))

    def __str__(self) -> str:
        return f"`{self.name}`{f' ({self.where})' if self.where else ''}"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of a step.

    Args:
        batch: what it runs on, of tensors that share no memory.
        altered: what reads of samples' values give instead.
        more: what is chosen by samples' values has some more rows.
        all_vary: tensors of the batch that have no dimension of samples vary too.

    Attributes:
        reads, chosen: how often values were read, and chosen by values outside of layers.
        values: all that were read, those that follow from no sample too.
        inside: how many layers run, each in the one before; what they choose by values is theirs.
    """

    def __init__(
        self, batch: Any, altered: PerturbedReads | None = None, more: bool = False, all_vary: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads, self.altered, self.inside = 0, altered, 0
        self.values: list[Any] = []
        self.chosen, self.more = 0, more
        self._results: dict[int, dict[Any, Operation]] = {}  # by storage and by how the tensor looks at it
        self._changed: dict[int, list[Operation]] = {}  # by storage that was written through a window: all in it
        self._held: list[Any] = []  # so that no other storage gets the same number
        named, samples = tensors_of(batch), 0 if all_vary else samples_in(batch)
        for place, tensor in named.items():
            varies = all_vary or (tensor.dim() > 0 and tensor.shape[0] == samples)
            one = Operation("batch", {}, tuple(tensor.shape), varies, place=place)
            one.floating, one.truth = tensor.is_floating_point(), tensor.dtype == torch.bool
            self._put(tensor, one)
        places = {id(tensor) for tensor in named.values()}
        for tensor in tensors_in(batch):
            if id(tensor) not in places:
                self._put(tensor, Operation("batch", {}, tuple(tensor.shape), True))

    def operation_of(self, tensor: Tensor) -> Operation:
        """Operation that gave this tensor."""
        storage, window = self._key(tensor)
        operation = self._results.get(storage, {}).get(window)
        if operation is None:
            inside = self._changed.get(storage)
            if inside is not None:
                varies = any(one.varies for one in inside)
                return Operation(WRITTEN, {"inside": inside}, tuple(tensor.shape), varies)
            operation = Operation("constant", {}, tuple(tensor.shape), value=_signature(tensor))
            self._put(tensor, operation)
        return operation

    def is_mean(self, result: Tensor, inside: dict[str, Any]) -> None:
        """A loss of torch's gave this, however it is computed."""
        given = {key: self.operation_of(v) if isinstance(v, Tensor) else v for key, v in inside.items()}
        storage, window = self._key(result)
        whole = Operation("cross_entropy", given, tuple(result.shape), True, where=_users_line())
        self._results[storage] = {window: whole}

    def read(self, value: Any, tensor: Tensor | None) -> Any:
        """Value that Python gets on a read; layers decide by those of micro-batches, and get them as they are."""
        self.values.append(value)
        if self.inside or tensor is None or not self.operation_of(tensor).varies:
            return value
        self.reads += 1
        return value if self.altered is None else self.altered.instead_of(value)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Result of an operation, or of what hands all values of a tensor to Python."""
        return func(*args, **kwargs)

    def _with_rows(self, result: Any, given: dict[str, Any]) -> Any:
        """Rows that samples' values choose, of which Python gets the shape; with some more where that is altered."""
        if not any(one.varies for one in Operation("", given).operands()):
            return result
        self.chosen += 1
        if not self.more:
            return result
        return tree_map(
            lambda one: torch.cat([one, one.new_zeros(_MORE, *one.shape[1:])]) if isinstance(one, Tensor) else one,
            result,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, schema_of(func)
        name = schema.name.removeprefix("aten::")
        if name in READS:
            return self.read(self.run(func, args, kwargs), next((a for a in args if isinstance(a, Tensor)), None))
        names = [argument.name for argument in schema.arguments]
        before = {key: self._noted(value) for key, value in (*zip(names, args, strict=False), *kwargs.items())}
        random = torch.Tag.nondeterministic_seeded in func.tags
        selects = name != "_ctc_loss" and torch.Tag.dynamic_output_shape in func.tags
        if name in ("index", "index_put", "index_put_") and args[1]:
            by_mask = any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
            selects, before["by_mask"] = by_mask and name == "index", by_mask
        result = self.run(func, args, kwargs)
        if name == "bincount" and len(result) <= before.get("minlength", 0):
            selects = False  # as many bins as were asked for
        if selects and not self.inside:
            result = self._with_rows(result, before)
        operation = Operation(name.removesuffix("_") if schema.is_mutable else name, before, selects=selects)
        operation.varies = any(one.varies for one in operation.operands())
        written = [
            value
            for value, argument in zip([*args, *kwargs.values()], schema.arguments, strict=False)
            if schema.is_mutable
            and isinstance(value, Tensor)
            and argument.alias_info is not None
            and argument.alias_info.is_write
        ]
        for tensor in written:
            storage, window = self._key(tensor)
            others = [one for key, one in self._results.get(storage, {}).items() if key != window]
            if others:
                self._changed[storage] = [*self._changed.get(storage, others), self._shaped(operation, tensor, random)]
            self._results[storage] = {}
            self._put(tensor, self._shaped(operation, tensor, random))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and all(leaf is not one for one in written):
                self._put(leaf, self._shaped(operation, leaf, random))
        return result

    def _shaped(self, operation: Operation, tensor: Tensor, random: bool) -> Operation:
        one = Operation(
            operation.name, operation.given, tuple(tensor.shape), operation.varies, selects=operation.selects
        )
        if not operation.varies:
            has_value = operation.name == "lift_fresh" or not any(
                math.isnan(operand.value) for operand in operation.operands()
            )
            unread = random or not has_value
            one.value = 0.0 if operation.name in _NOTHING else math.nan if unread else _signature(tensor)
        elif tensor.numel() <= _SHOWN or operation.selects:
            one.where = _users_line()
        return one

    def _noted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.operation_of(value)
        return [self._noted(one) for one in value] if isinstance(value, list | tuple) else value

    def _put(self, tensor: Tensor, operation: Operation) -> None:
        """Note the operation that gave a tensor; another name for one that is there is that one."""
        storage, window = self._key(tensor)
        self._results.setdefault(storage, {}).setdefault(window, operation)

    def _key(self, tensor: Tensor) -> tuple[int, Any]:
        if not _has_memory(tensor):
            self._held.append(tensor)
            return id(tensor), None
        storage = tensor.untyped_storage()
        self._held.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        window = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        return int(storage_address(storage)), window


class _Calls(TorchFunctionMode):
    """Tells a recorder of losses whose operations say less than their arguments, and of values that are read whole."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        altered = self._recorder.altered
        with nullcontext() if altered is None else altered.within_operation():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _READ_WHOLE:
            return self._recorder.read(self._recorder.run(func, args, kwargs), args[0])
        result = func(*args, **kwargs)
        if func is F.cross_entropy:
            bound = _CROSS_ENTROPY.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            legacy = given["size_average"] is not None or given["reduce"] is not None
            smoothed = given["label_smoothing"] and given["reduction"] == "mean" and not legacy
            if smoothed and given["weight"] is None and not given["target"].is_floating_point():
                self._recorder.is_mean(result, {"self": given["input"], **given, "weight": None, "reduction": 1})
        return result


@dataclass(frozen=True)
class RecordedRun:
    """A step on some samples: what it gave, and who noted its operations."""

    samples: int
    output: Any
    recorder: Recorder


def record(
    step: Callable[[Any], Any],
    batch: Any,
    looks: Callable[[Recorder], Any] | None = None,
    altered: PerturbedReads | None = None,
    more: bool = False,
    kind: Callable[..., Recorder] | None = None,
    samples: int | None = None,
) -> RecordedRun:
    """Run a step and note its operations. The caller sees to it that it begins alike each time and leaves no trace.

    Args:
        looks: is given the recorder before the run, to tell it what layers return.
        altered: what reads of samples' values give instead.
        more: what is chosen by samples' values outside of layers has some more rows.
        kind: of recorder, for a step that may run backward passes of its own: what autograd saves is kept.
        samples: how many there are, where the batch's first dimensions do not tell.
    """
    batch = replaced_tensors(batch, torch.clone)
    recorder = (kind or Recorder)(batch, altered, more, samples is not None)
    if looks is not None:
        looks(recorder)
    hooks = nullcontext() if kind is not None else torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)
    with torch.enable_grad(), hooks, recorder, _Calls(recorder):
        output = step(batch)
    count = samples_in(batch) if samples is None else samples
    return RecordedRun(count, output, recorder)


def _nothing(_: Any) -> Any:
    """Keep nothing of what autograd would save."""


def record_altered(
    step: Callable[[Any], Any],
    batch: Any,
    run: RecordedRun,
    looks: Callable[[Recorder], Any] | None = None,
    kind: Callable[..., Recorder] | None = None,
    samples: int | None = None,
) -> Iterator[RecordedRun | None]:
    """The same with other values where it reads those of samples, and more of them where it chooses by values.

    Gives None where it can run on none of them. Left out are runs in which it checks what it reads, and raises.

    Args:
        looks, kind, samples: as in :func:`record`.
    """
    further: dict[str, Any] = {"looks": looks, "kind": kind, "samples": samples}
    reads = run.recorder.reads
    alone = [[number] for number in range(min(reads, _ALTERED_ALONE))]
    for which in [*alone, range(reads)] if reads else ():
        could, refused = False, False
        for how in get_args(Alteration):
            for last in (max(which), sys.maxsize):  # what is checked behind them may allow no other values there
                altered = PerturbedReads(set(which), last, how)
                try:
                    other = record(step, batch, altered=altered, **further)
                except Exception as error:  # as math.exp() of what is too large
                    refused |= altered.checked(error)
                    continue
                could = True
                yield other
                break
        if not could and not refused:
            yield None
    if run.recorder.chosen:
        altered = PerturbedReads((), sys.maxsize, "other")
        try:
            yield record(step, batch, altered=altered, more=True, **further)
        except Exception as error:
            if not altered.checked(error):
                yield None
    for texts, of_batch in _other_lengths(batch) if samples is None else ():
        try:
            yield record(step, texts, **further)
        except Exception:
            if of_batch:
                yield None


def _other_lengths(batch: Any) -> Iterator[tuple[Any, bool]]:
    """The batch with the shortest, the longest, and one twice as long, which is none of its own, in place of all.

    Of texts, and of lists and dictionaries of lists, where each sample has one.
    """
    samples = samples_in(batch)

    def has_lengths(leaf: Any) -> bool:
        kinds = (str, bytes, list, tuple, dict)
        return isinstance(leaf, list | tuple) and len(leaf) == samples and all(isinstance(one, kinds) for one in leaf)

    for choose, times in ((min, 1), (max, 1), (max, 2)):
        others: list[Any] = []

        def change(_: str, leaf: Any, choose: Any = choose, times: int = times, others: list[Any] = others) -> Any:
            if not has_lengths(leaf):
                return leaf
            others.append(leaf)
            return type(leaf)([_longer(choose(leaf, key=_length), times)] * len(leaf))

        changed = map_leaves(batch, change)
        if others:
            yield changed, times == 1


def _length(entry: Any) -> int:
    lists = (
        [value for value in entry.values() if isinstance(value, list | tuple)] if isinstance(entry, dict) else [entry]
    )
    return sum(map(len, lists))


def _longer(entry: Any, times: int) -> Any:
    if isinstance(entry, dict):
        return {key: value * times if isinstance(value, list | tuple) else value for key, value in entry.items()}
    return entry * times


_ALTERED_ALONE = 4
"""So many reads of values are each altered by itself too: one that is checked would hide what follows."""


def without_views(operation: Operation) -> Operation:
    while operation.name in SAME_VALUES and not operation.edge and "self" in operation.given:
        before = operation.given["src" if operation.name == "copy" and "src" in operation.given else "self"]
        if not isinstance(before, Operation):
            break
        operation = before
    return operation


def _has_memory(tensor: Tensor) -> bool:
    return has_storage(tensor) or type(tensor) is FakeTensor


def _signature(tensor: Tensor) -> float:
    if tensor.device.type == "meta" or not _has_memory(tensor):
        return math.nan
    some = tensor.detach()
    try:
        if some.numel() == 1:
            return abs(some.item())
        if some.numel() > _SIGNED:
            some = some.flatten()[:: some.numel() // _SIGNED]
        return float(some.sum() if some.dtype == torch.bool else some.abs().double().sum())
    except DataDependentOutputException:  # a tensor without values
        return math.nan


def _users_line() -> str:
    """The innermost line that no library owns."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_globals.get("__name__", "")):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
