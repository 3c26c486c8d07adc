"""What a probed step does beside its arithmetic: its precision, its random numbers, the constants it compares with.

Random numbers are drawn sample by sample from seeds of their own, so that a sample gets the same noise whichever part
of the batch it is in; only then can the gradient of a batch be compared with those of its parts. Dropout is switched
off, as it may lie along other dimensions than the batch's.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from retime.foundations.parts import COMPARED
from retime.foundations.preserve_state import seed_torch
from retime.foundations.torch_private.engine import (
    TorchDispatchMode,
    schema_of,
    tree_leaves,
    tree_map,
    without_dispatch_modes,
)

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
        with register_module_forward_hook(self._after):
            yield

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
_ATTENTION_DROPOUT = 4  # its place among the arguments of scaled_dot_product_attention
_ATTENTION = inspect.signature(F.multi_head_attention_forward)


class NoDropout(TorchFunctionMode):
    """Dropout hands its input on; attention drops nothing. Recurrent layers are told by their ``dropout`` attribute.

    Attributes:
        seen: whether anything would have been dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.seen |= bool(training and kwargs.get("p", args[1] if len(args) > 1 else 0.5))
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            self.seen |= bool(kwargs.pop("dropout_p", 0) or args[_ATTENTION_DROPOUT:][:1] not in ((), (0.0,)))
            head, tail = args[:_ATTENTION_DROPOUT], args[_ATTENTION_DROPOUT + 1 :]
            return func(*head, *((0.0,) if tail else ()), *tail, **kwargs)
        if func is F.multi_head_attention_forward:
            bound = _ATTENTION.bind(*args, **kwargs)
            self.seen |= bool(bound.arguments["dropout_p"] and bound.arguments.get("training", True))
            bound.arguments["dropout_p"] = 0.0
            return func(*bound.args, **bound.kwargs)
        return func(*args, **kwargs)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one run of a step on some samples of a batch.

    Args:
        names: the samples' numbers in the batch that is probed; they seed their random numbers.

    Attributes:
        epsilon: of the coarsest floating-point type that an operation gave.
        drawn: whether it drew random numbers.
        for_all: where it drew some that are none of single samples: a function of torch, Python's random, or NumPy.
    """

    def __init__(self, names: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list(names)
        self.epsilon = 0.0
        self.drawn = False
        self.for_all: list[str] = []
        self._generators = _generators()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self.for_all += [name for name, state in _generators().items() if state != self._generators.get(name)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        result = self._draw(func, args, kwargs) if is_random(func, args, kwargs) else func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.epsilon = max(self.epsilon, torch.finfo(leaf.dtype).eps)
        return result

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
        batch_dimension = self._batch_dimension(func, args)
        if batch_dimension is None:
            self.for_all.append(f"torch's {schema_of(func).name.removeprefix('aten::').removesuffix('_')}")
            seed_torch(base)
            return func(*args, **kwargs)
        dimension, length = batch_dimension
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


def _generators() -> dict[str, Any]:
    """States of Python's and NumPy's global generators; NumPy's as the place in its numbers."""
    numpy = sys.modules.get("numpy")
    states = {} if numpy is None else {"NumPy": numpy.random.get_state()[2:]}
    return {"Python's random": random.getstate(), **states}


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
