"""What a probed step does beside its arithmetic: the constants it compares with, its precision, and its random numbers.

Random numbers are drawn sample by sample from seeds of their own, so that a sample gets the same noise whichever part
of the batch it is in; only then can the gradient of a batch be compared with those of its parts. Dropout is switched
off, as it may lie along other dimensions than the batch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from retime.foundations.parts import COMPARED, OPPOSITE, PerturbedReads, tensors_of
from retime.foundations.preserve_state import cuda_generators, seed_torch
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import TorchDispatchMode, schema_of, tree_leaves, tree_map, without_dispatch_modes
from retime.mechanisms.memory_budget.separability.flow import READS, Flow

__all__ = [
    "Compared",
    "NoDropout",
    "SampleNoise",
    "Watch",
    "ZeroWeights",
    "cuda_generators",
    "is_random",
]


_MOST_SAMPLES = 1000


class SampleNoise:
    """Changes what modules with parameters give by noise of its size, and of 1 or more, drawn sample by sample.

    A model at its start gives nearly the same for all samples, and then any function of a batch looks like a mean.
    A sample gets the same noise in a batch and in a part of it.

    Attributes:
        names: numbers of the samples that run.
    """

    def __init__(self) -> None:
        self.names: Sequence[int] = ()
        self._calls = 0

    @contextmanager
    def of(self, names: Sequence[int]) -> Iterator[None]:
        """Around a run of the step on these samples."""
        self.names, self._calls = names, 0
        handle = register_module_forward_hook(self._after)
        try:
            yield
        finally:
            handle.remove()

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return tree_map(self._changed, output) if any(True for _ in module.parameters(recurse=False)) else output

    def _changed(self, value: Any) -> Any:
        count = len(self.names)
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        dimension = next((i for i, length in enumerate(value.shape[:2]) if length % count == 0), None)
        if dimension is None:
            return value
        self._calls += 1
        with without_dispatch_modes(), torch.no_grad():
            rows = value.detach().chunk(count, dimension)
            noise = [self._noise(name, row) for name, row in zip(self.names, rows, strict=True)]
            changed = torch.cat(noise, dimension)
        return (value + changed) * 0.5**0.5  # no larger from layer to layer

    def _noise(self, name: int, row: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self._calls * _MOST_SAMPLES + name)
        noise = torch.randn(row.shape, generator=generator).to(row)
        return noise * row.square().mean().sqrt().clamp(min=1)


# Terms of a loss that count for nothing yet: a probe runs once more as if they had a weight.
#
# A term that is multiplied by 0 in the first batch (a warm-up, a weight of a schedule) has no gradient there, whatever
# it does to its samples.

_WEIGHT = 0.7310585786300049
"""No number that a step would use."""
_MOST = 256
"""Weights of terms are few; a table of more entries is something else."""
_PRODUCTS = {"mul", "dot", "vdot", "mv", "mm"}
_SCALED = {"add": "alpha", "sub": "alpha", "rsub": "alpha", "addmm": "alpha", "addmv": "alpha", "baddbmm": "alpha"}
_SCALED |= {"addbmm": "alpha", "addr": "alpha", "addcmul": "value", "addcdiv": "value"}


class ZeroWeights:
    """Finds numbers 0 that what follows from samples or parameters is multiplied by.

    Args:
        lifted: another number takes their place.
        number_of: a number for a tensor's storage, which no other gets.

    Attributes:
        found: there was one.
    """

    def __init__(self, lifted: bool, number_of: Callable[[Tensor], int]) -> None:
        self.lifted, self.found = lifted, False
        self._number_of = number_of
        self._derived: set[int] = set()

    def derive(self, tensors: object) -> None:
        """These follow from samples."""
        self._derived.update(self._number_of(one) for one in tree_leaves(tensors) if isinstance(one, Tensor))

    def instead_of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What an operation is given."""
        name = schema_of(func).name.removeprefix("aten::").removesuffix("_")
        if name in _PRODUCTS:
            pairs = zip(args[:2], (args[1], args[0]), strict=True)
            args = (*(self._weight(one, other) for one, other in pairs), *args[2:])
        elif name == "lerp":
            args = (*args[:2], self._weight(args[2], args[0]), *args[3:])
        elif name in _SCALED and kwargs.get(_SCALED[name], 1) == 0:
            kwargs = {**kwargs, _SCALED[name]: self._weight(0, next((one for one in args if self._follows(one)), None))}
        return args, kwargs

    def note(self, args: Any, kwargs: dict[str, Any], result: object) -> None:
        """An operation has run."""
        if any(map(self._is_derived, tree_leaves((args, kwargs)))):
            self.derive(result)

    def _weight(self, value: Any, other: Any) -> Any:
        if not self._follows(other) or not self._is_zero(value):
            return value
        self.found = True
        if not self.lifted:
            return value
        if isinstance(value, Tensor):
            kept = value if value.is_floating_point() else value.to(other.dtype)
            return torch.where(kept == 0, torch.full_like(kept, _WEIGHT), kept)
        return _WEIGHT

    def _is_zero(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return isinstance(value, int | float) and value == 0
        weight = value.numel() == 1 and value.is_leaf and value.requires_grad  # a trained one
        constant = value.numel() <= _MOST and not value.is_complex() and not self._is_derived(value)
        return (weight or constant) and bool((value == 0).any())

    def _follows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and self._is_derived(value)

    def _is_derived(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (value.requires_grad or self._number_of(value) in self._derived)


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
        self, names: Sequence[int], batch: Any = None, altered: PerturbedReads | None = None, lifted: bool = False
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
