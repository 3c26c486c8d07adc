"""What a probed step does beside its arithmetic: the constants it compares with, its precision, and its random numbers.

Random numbers are drawn sample by sample from seeds of their own, so that a sample gets the same noise whichever part
of the batch it is in; only then can the gradient of a batch be compared with those of its parts. Dropout is switched
off, as it may lie along other dimensions than the batch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retime.foundations.parts import COMPARED, OPPOSITE, tensors_of
from retime.foundations.preserve_state import cuda_generators, seed_torch
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import TorchDispatchMode, schema_of, tree_leaves
from retime.mechanisms.memory_budget.separability.altered import Altered
from retime.mechanisms.memory_budget.separability.flow import READS, Flow
from retime.mechanisms.memory_budget.separability.zero_weights import ZeroWeights

__all__ = ["Compared", "NoDropout", "Watch", "cuda_generators", "is_random"]

_SEEDS = 2**31
_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
}
_READ_WHOLE = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_ATTENTION_DROPOUT = 4  # its place among the arguments of scaled_dot_product_attention
_ATTENTION = inspect.signature(F.multi_head_attention_forward)


class NoDropout(TorchFunctionMode):
    """Dropout hands its input on; attention drops nothing. Recurrent layers are told by their ``dropout`` attribute.

    Values that are read without an operation are told to ``watch``.

    Attributes:
        seen: whether anything would have been dropped.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__()
        self.seen = False
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        altered = self._watch.altered if self._watch is not None else None
        if altered is None:
            return self._handled(func, args, kwargs)
        with altered.within_operation():
            return self._handled(func, args, kwargs)

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _DROPOUTS:
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            drops = bool(training and kwargs.get("p", args[1] if len(args) > 1 else 0.5))
            self.seen |= drops
            given = args[0] if args else kwargs["input"]
            return self.dropped(given) if drops else given
        if func is F.scaled_dot_product_attention:
            self.seen |= bool(kwargs.pop("dropout_p", 0) or args[_ATTENTION_DROPOUT:][:1] not in ((), (0.0,)))
            head, tail = args[:_ATTENTION_DROPOUT], args[_ATTENTION_DROPOUT + 1 :]
            return func(*head, *((0.0,) if tail else ()), *tail, **kwargs)
        if func is F.multi_head_attention_forward:
            bound = _ATTENTION.bind(*args, **kwargs)
            self.seen |= bool(bound.arguments["dropout_p"] and bound.arguments.get("training", True))
            bound.arguments["dropout_p"] = 0.0
            return func(*bound.args, **bound.kwargs)
        if func in _READ_WHOLE:
            return self.read_whole(func, args, kwargs)
        return func(*args, **kwargs)

    def dropped(self, given: Tensor) -> Tensor:
        """What comes out of dropout."""
        return given if self._watch is None else self._watch.flow.drawn(given)

    def read_whole(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """All values of a tensor are handed to Python."""
        if self._watch is None:
            return func(*args, **kwargs)
        self._watch.flow.read(args[0])
        return self._watch.handed_out(func(*args, **kwargs))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one run of a step on some samples of a batch.

    Args:
        names: the samples' numbers in the batch that is probed; they seed their random numbers.
        batch: what the step is run on.
        lifted: numbers 0 that terms of the loss are multiplied by are others.

    Attributes:
        compared: comparisons of integers with constants, and their opposites, with the place in the batch that the
            integers may have come from, such as ``("batch['labels']", "!=", -100)``; the ``ignore_index`` of a loss is
            one. A tensor may come from any of as many entries, with or without the first of each row.
        epsilon: of the coarsest floating-point type that an operation gave.
        drawn: whether it drew random numbers.
        flow: the operations of its forward pass.
        altered: what the reads of values in the forward pass gave instead, if anything else is asked for.
        zeros: numbers 0 that terms of the loss are multiplied by.
        reads: the values that the forward pass read.
    """

    def __init__(
        self, names: Sequence[int], batch: Any = None, altered: Altered | None = None, lifted: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list(names)
        self.flow, self.altered = Flow(), altered
        self.flow.begin(batch)
        self.zeros = ZeroWeights(lifted, self.flow.number_of)
        self.zeros.derive(tensors_in(batch))
        self.reads: list[Any] = []
        self.compared: set[tuple[str, str, float]] = set()
        self._entries = {place: _entries(tensor) for place, tensor in tensors_of(batch).items()}
        self.epsilon = 0.0
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self._note_constants(func, args)
        args, kwargs = self.zeros.instead_of(func, args, kwargs)
        random = is_random(func, args, kwargs)
        result = self._draw(func, args, kwargs) if random else func(*args, **kwargs)
        self.flow.note(func, args, kwargs, result, random)
        self.zeros.note(args, kwargs, result)
        if schema_of(func).name.removeprefix("aten::") in READS:
            return self.handed_out(result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.epsilon = max(self.epsilon, torch.finfo(leaf.dtype).eps)
        return result

    def handed_out(self, value: Any) -> Any:
        """What Python gets that reads this value."""
        if not self.flow.recording:
            return value
        self.reads.append(value)
        return self.altered.instead_of(value) if self.altered is not None else value

    def _note_constants(self, func: Any, args: Any) -> None:
        name = schema_of(func).name.removeprefix("aten::")
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            self._note(args[1], "!=", float(args[4]))
        elif name in COMPARED and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            value = args[1]
            if not isinstance(value, Tensor) or value.dim() == 0:
                self._note(args[0], COMPARED[name], float(value))
                self._note(args[0], OPPOSITE[COMPARED[name]], float(value))

    def _note(self, tensor: Tensor, comparison: str, value: float) -> None:
        for place, entries in self._entries.items():
            if tensor.numel() in entries:
                self.compared.add((place, comparison, value))

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a random operation with seeds that depend on the sample, and on how many were drawn before.

        How many is kept in the CPU generator's state, which activation checkpointing brings back when it recomputes.
        """
        self.drawn = True
        if "generator" in kwargs:
            kwargs["generator"] = None  # one of the user's own would be left moved on
        base = int(torch.randint(_SEEDS, ()))
        state = torch.default_generator.get_state()
        try:
            return self._by_sample(func, args, kwargs, base)
        finally:
            torch.default_generator.set_state(state)

    def _by_sample(self, func: Any, args: Any, kwargs: Any, base: int) -> Any:
        found = self._batch_dimension(func, args)
        if found is None:
            seed_torch(base)
            return func(*args, **kwargs)
        dimension, length = found
        block = length // len(self.names)
        results = []
        for position, name in enumerate(self.names):
            seed_torch(base + 1 + name)
            rows = [_rows(value, dimension, length, position * block, block) for value in args]
            named = {key: _rows(value, dimension, length, position * block, block) for key, value in kwargs.items()}
            results.append(func(*rows, **named))
        if schema_of(func).name.endswith("_"):
            return args[0]
        if isinstance(results[0], Tensor):
            return torch.cat(results, dimension)
        return tuple(torch.cat(column, dimension) for column in zip(*results, strict=True))

    def _batch_dimension(self, func: Any, args: Any) -> tuple[int, int] | None:
        """The dimension that runs over samples and its length; None where there is no telling."""
        if not all(str(result.type) == "Tensor" for result in schema_of(func).returns):
            return None
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else _size(value) for value in args]
        shape = next((shape for shape in shapes if shape), None)
        if not shape:
            return None
        if shape[0] and shape[0] % len(self.names) == 0:
            return 0, shape[0]
        if len(shape) > 1 and shape[1] == len(self.names):
            return 1, shape[1]
        return None


class Compared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which numbers integers are compared with.

    Attributes:
        constants: comparisons and numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants: set[tuple[str, float]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = schema_of(func).name.removeprefix("aten::")
        if name in COMPARED and not args[0].is_floating_point() and not isinstance(args[1], Tensor):
            self.constants.add((name, float(args[1])))
        return func(*args, **(kwargs or {}))


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention and recurrent kernels count as random although they drop nothing here."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def _entries(tensor: Tensor) -> tuple[int, ...]:
    """How many entries an integer tensor has, whole and without the first of each row."""
    if tensor.dim() == 0 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return ()
    return tensor.numel(), tensor[:, 1:].numel() if tensor.dim() > 1 else tensor.numel()


def _size(value: Any) -> tuple[int, ...] | None:
    """The shape that a factory such as ``torch.rand`` is asked for."""
    if isinstance(value, list | tuple) and value and all(isinstance(length, int) for length in value):
        return tuple(value)
    return None


def _rows(value: Any, dimension: int, length: int, start: int, count: int) -> Any:
    if isinstance(value, Tensor):
        matches = value.dim() > dimension and value.shape[dimension] == length
        return value.narrow(dimension, start, count) if matches else value
    size = _size(value)
    if size is not None and len(size) > dimension and size[dimension] == length:
        return [*size[:dimension], count, *size[dimension + 1 :]]
    return value
