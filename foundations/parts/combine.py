"""What the parts of a batch give, put together as the whole would: losses by weights, outputs, running statistics.

The paper adds the gradients of equal sub-batches (moDNN, section 4.2), which is Eq. 4 as long as the loss is a mean
over samples. A loss that is a mean over anything else, such as the tokens that are not padding, needs other weights.
They must be known before the backward pass of the first sub-batch, so they have to be countable in the batch itself.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retime.foundations.parts.split import batch_size_of, leaves_of, map_leaves, tensors_of
from retime.foundations.storages import has_storage, tensors_in
from retime.foundations.torch_private.nn_and_optim import BatchNormBase, own_buffers

_SAME_SUM = 1e-5
"""Weights of parts may add up to so much more or less than 1."""
OPPOSITE = {"!=": "==", "==": "!=", ">": "<=", ">=": "<", "<": ">=", "<=": ">"}
COMPARED = {"ne": "!=", "eq": "==", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
"""Comparisons, by the names of the operations."""
_COMPARISONS: dict[str, Callable[[Any, float], Any]] = {of: getattr(operator, name) for name, of in COMPARED.items()}


@dataclass(frozen=True)
class Count:
    """Something that can be counted in a part of a batch: entries of one tensor that compare so, or their sum.

    Args:
        place: of the tensor, as :func:`~retime.foundations.parts.split.tensors_of` names it.
        comparison: ``"!="``, ``"=="``, ``">"``, ``">="``, ``"<"``, ``"<="`` with ``value``, or ``"sum"`` of entries.
        value: as in ``labels != -100``.
        cut: ``select`` and ``slice`` that the step takes of it, with their numbers.
        least, added: a step divides by ``clamp(min=least)`` of the number, or by the number with this added to it.
        needed: what is divided need not be 0 where the number is, so a part without any has no loss.
        exact: parts have to count what the batch does, as something beside the mean is the same for all of them.
    """

    place: str
    comparison: str
    value: float = 0
    cut: tuple[tuple[str, tuple[int, ...]], ...] = ()
    least: float | None = None
    added: float = 0
    needed: bool = False
    exact: bool = field(default=False, compare=False)

    def __call__(self, part: Any) -> Tensor:
        """The number in this part, as a scalar on the tensor's device; float64 for a sum.

        A sum that is 0 of entries that are not is NaN: what is divided by it need not be 0.

        Raises:
            LookupError: the part has no such tensor.
        """
        tensor = tensors_of(part).get(self.place)
        if tensor is None:
            raise LookupError(f"{self.place}, which the loss is a mean over, is not in this batch")
        tensor = tensor.detach()
        for name, numbers in self.cut:
            if name == "select":
                tensor = tensor.select(*numbers)
            else:
                dimension, start, stop, step = numbers
                tensor = tensor[(slice(None),) * (dimension % tensor.dim()) + (slice(start, stop, step),)]
        if self.comparison != "sum":
            return _COMPARISONS[self.comparison](tensor, self.value).sum()  # type: ignore[no-any-return]
        total = tensor.sum(dtype=torch.float32 if tensor.device.type == "mps" else torch.float64)
        if self.least is not None or self.added:
            return total
        return total.masked_fill((total == 0) & tensor.any(), math.nan)

    def __str__(self) -> str:
        def index(name: str, numbers: tuple[int, ...]) -> str:
            dimension, start, *rest = numbers
            stop = "" if not rest or rest[0] > sys.maxsize // 2 else rest[0]
            inside = str(start) if name == "select" else f"{start or ''}:{stop}"
            return f"[{':, ' * dimension}{inside}]"

        where = f"{self.place}{''.join(index(*one) for one in self.cut)}"
        text = f"sum({where})" if self.comparison == "sum" else f"count({where} {self.comparison} {self.value:g})"
        text = text if self.least is None else f"max({text}, {self.least:g})"
        return f"({text} + {self.added:g})" if self.added else text

    def shares(self, counted: Sequence[float], samples: Sequence[int]) -> list[float]:
        """The weights of parts that count so: what a part's sum is divided by, over what the batch's is.

        Args:
            counted: what each part counts.
            samples: in each part, which weigh where nothing is divided by.

        Raises:
            LookupError: a part without any has no loss.
        """
        least = -math.inf if self.least is None else self.least
        *parts, whole = (max(number, least) + self.added for number in (*counted, sum(counted)))
        empty = [number for number, divisor in zip(counted, parts, strict=True) if not divisor]
        cancelled = any(map(math.isnan, counted)) or any(empty) or (not whole and any(parts))
        if cancelled or (self.needed and empty):
            raise LookupError(f"{self}, which the loss divides by, is 0 in this batch or in a part of it")
        if self.exact and whole and abs(sum(parts) / whole - 1) > _SAME_SUM:
            raise LookupError(f"{self} is more in parts than in the batch, and the loss has a term that is no mean")
        return [part / whole for part in parts] if whole else normalised(samples, samples)


@dataclass(frozen=True)
class Weighting:
    """Rule to weigh the parts of a batch by, so that their losses add up to the batch's.

    Args:
        kind: ``"mean"`` by samples, ``"sum"`` with weight 1, ``"count"`` by ``count`` of each part.
        count: for ``"count"``: a :class:`Count`, or any function from a part to a number.
    """

    kind: Literal["mean", "sum", "count"]
    count: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if (self.kind == "count") != (self.count is not None):
            raise ValueError(f"Weighting({self.kind!r}, count={self.count}): count goes with kind 'count', and only it")

    def exactly(self) -> Weighting:
        """The same, whose weights have to add up to 1."""
        return replace(self, count=replace(self.count, exact=True)) if isinstance(self.count, Count) else self

    def of(self, parts: Sequence[Any], samples: Sequence[int]) -> list[float]:
        """The weight of each part; they add up to 1, but for kind ``"sum"`` and counts with a least value.

        Where nothing is counted in the whole batch the parts are weighed by samples: the loss has no value then, which
        the step shows with these weights too.
        """
        return weights_by([self], parts, samples)[0]

    def raw(self, parts: Sequence[Any], samples: Sequence[int]) -> list[Any]:
        """Count of each part, before it is divided by the total: numbers, or scalars on the parts' device."""
        if self.count is not None:
            return [self.count(part) for part in parts]
        return [1.0] * len(parts) if self.kind == "sum" else list(samples)

    def __str__(self) -> str:
        return {"mean": "mean over samples", "sum": "sum over samples"}.get(self.kind, f"mean over {self.count}")


def weights_by(weightings: Sequence[Weighting], parts: Sequence[Any], samples: Sequence[int]) -> list[list[float]]:
    """:meth:`Weighting.of` for several at once, with one transfer from the device for all that is counted."""
    raw = [weighting.raw(parts, samples) for weighting in weightings]
    counted = [value.detach().reshape(()) for row in raw for value in row if isinstance(value, Tensor)]
    widest = torch.float32 if any(value.device.type == "mps" for value in counted) else torch.float64
    device = counted[0].device if counted else None
    numbers = iter(torch.stack([value.to(device, widest) for value in counted]).tolist() if counted else [])
    rows = [[next(numbers) if isinstance(value, Tensor) else float(value) for value in row] for row in raw]
    return [
        row
        if weighting.kind == "sum"
        else weighting.count.shares(row, samples)
        if isinstance(weighting.count, Count)
        else normalised(row, samples)
        for weighting, row in zip(weightings, rows, strict=True)
    ]


def normalised(raw: Sequence[float], samples: Sequence[int]) -> list[float]:
    """Shares of the total; by samples where the total is 0."""
    total = sum(raw)
    if total == 0:
        raw, total = samples, sum(samples)
    return [value / total for value in raw]


# What a probe found out about splitting a step's batch, and the exact weights that follow from it.

_SAME = 1e-9  # counts are exact in float64, and weights are at most 1


class NotSeparableError(RuntimeError):
    """Sub-batches would not give the batch's gradient; the message says why and what to do instead."""


class WeightsUnclearError(RuntimeError):
    """A batch whose parts have no weights: terms of the loss weigh them differently, or it lacks what is counted."""


@dataclass(frozen=True)
class Example:
    """The scalars that a probed step returned, by place, for a small batch and for its parts.

    Attributes:
        weights: of each part's loss.
    """

    whole: Mapping[str, float]
    parts: tuple[Mapping[str, float], ...]
    samples: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Certificate:
    """Verdict on whether the gradient of a batch is a weighted sum of those of its parts, and by which weights.

    Attributes:
        weighting: how to weigh the parts; None where sub-batches would change the numbers.
        reason: why they would; empty where they would not.
        layers: the layers to blame, or those whose gradients differ most.
        error: largest relative difference between the batch's gradient and the weighted sum, over all probes.
        tolerance: what was allowed; it follows from the precision that the step computes in.
        samples: samples in the probed batch.
        alternatives: further weightings, of other terms of the loss, which have to weigh the parts of a batch alike:
            :func:`loss_weights` compares them on every batch.
        outputs: how each scalar that the step returns, by place (``output['loss']``), adds up from parts.
        told: places of those of which the operations behind them told it.
        unclear: places of the scalars for which no way to add them up was found.
        examples: the scalars themselves, for callers that combine several of them.
        notes: what else a user should know.
        drawn: random numbers that are none of single samples, and what to change; empty where there are none.
        constants: the weights follow from what the step itself compares entries of the batch with.
        sizes: of the batches, in samples, with which the step is known to do the same.
        reads: the numbers that the probed step read from tensors, in order; None where it read something else.
    """

    weighting: Weighting | None
    reason: str = ""
    layers: tuple[str, ...] = ()
    error: float = 0.0
    tolerance: float = 0.0
    samples: int = 0
    alternatives: tuple[Weighting, ...] = ()
    outputs: Mapping[str, Weighting] = field(default_factory=dict)
    told: frozenset[str] = frozenset()
    unclear: tuple[str, ...] = ()
    examples: tuple[Example, ...] = ()
    notes: tuple[str, ...] = ()
    drawn: str = ""
    constants: bool = False
    sizes: frozenset[int] = field(default=frozenset(), compare=False)
    reads: tuple[bool | int | float | None, ...] = field(default=(), repr=False, compare=False)

    @property
    def separable(self) -> bool:
        return self.weighting is not None

    def __str__(self) -> str:
        if self.weighting is None:
            return f"not separable: {self.reason}"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"separable, {self.weighting}: gradients agree within {self.error:.1e} on {self.samples} samples{notes}"


def loss_weights(certificate: Certificate, parts: Sequence[Any], samples: Sequence[int] | None = None) -> list[float]:
    """Weight to multiply the loss of each part by, so that the gradients add up to the batch's.

    A part with weight 0 has nothing to learn from, and its loss may have no value (a mean over no tokens): leave its
    backward pass out. Counting takes one transfer from the device.

    Args:
        samples: how many samples each has; None asks :func:`~retime.foundations.parts.split.batch_size_of`.

    Raises:
        NotSeparableError: the certificate says that no weights exist.
        WeightsUnclearError: terms of the loss weigh the parts of this batch differently, or it lacks what is counted.
    """
    weighting = certificate.weighting
    if weighting is None:
        raise NotSeparableError(certificate.reason)
    sizes = [batch_size_of(part) for part in parts] if samples is None else list(samples)
    try:
        weights, *others = weights_by([weighting, *certificate.alternatives], parts, sizes)
    except LookupError as error:
        raise WeightsUnclearError(str(error)) from error
    for other, different in zip(certificate.alternatives, others, strict=True):
        if any(abs(one - two) > _SAME for one, two in zip(weights, different, strict=True)):
            raise WeightsUnclearError(
                f"the loss adds up a {weighting} and a {other}, which weigh the parts of this batch differently"
            )
    return weights


# What a step returned or logged for the parts of a batch, put together as for the whole.

_NONE: Mapping[str, Tensor] = MappingProxyType({})


class WholeOutput:
    """Output of a step for the parts of a batch, put together while they come.

    Of a tensor with one entry a sample only the whole batch's is kept, into which each part's entries are copied: all
    parts' tensors and then the joined one would need the memory twice.

    Args:
        samples: of each part, in order.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._parts: list[Any] = []
        self._whole: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, output: Any) -> None:
        """The next part's output, which is not held: tensors of it are detached, or copied."""
        index = len(self._parts)
        first = sum(self._samples[:index])
        size = self._samples[index]

        def keep(place: str, leaf: Any) -> Any:
            if index == 0 and len(self._samples) > 1 and has_entries(leaf, size):
                self._whole[place] = leaf.new_empty((sum(self._samples), *leaf.shape[1:]), requires_grad=False)
            whole = self._whole.get(place)
            if whole is not None and has_entries(leaf, size) and _alike(whole, leaf):
                return whole[first : first + size].copy_(leaf.detach())
            self._whole.pop(place, None)  # entries that were copied live on in the parts that they are from
            return leaf.detach() if isinstance(leaf, Tensor) else leaf

        self._parts.append(map_leaves(output, keep, "output"))

    def result(self, weights_of: Callable[[str], Sequence[float]]) -> Any:
        """The whole batch's output once all parts have been added; as :func:`combined`."""
        if len(self._samples) == 1:
            return self._parts[0]
        return combined(self._parts, self._samples, weights_of, self._whole)


def has_entries(leaf: Any, samples: int) -> bool:
    """Return whether an output is a tensor with one entry a sample."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples and has_storage(leaf)


def combined(
    outputs: Sequence[Any],
    samples: Sequence[int],
    weights_of: Callable[[str], Sequence[float]],
    whole: Mapping[str, Tensor] = _NONE,
) -> Any:
    """One output for the whole batch, of the same structure as each part's.

    Scalars are weighed; tensors and lists with one entry a sample are joined; what is the same in all parts stays; for
    anything else there is a list of the parts' values.

    Args:
        outputs: one a part, detached.
        samples: how many samples each part has.
        weights_of: from a place, such as ``"output['loss']"``, to the parts' weights for that scalar.
        whole: what is joined already, by place.

    Raises:
        ValueError: the parts' outputs differ in structure.
    """
    kinds: list[Callable[[Any], bool]] = [partial(_is_list_of_samples, samples=size) for size in samples]
    tables = [dict(leaves_of(output, "output", kind)) for output, kind in zip(outputs, kinds, strict=True)]
    if any(table.keys() != tables[0].keys() for table in tables):  # a list of something else, as long by chance
        kinds = [lambda _: False] * len(kinds)
        tables = [dict(leaves_of(output, "output")) for output in outputs]

    def join(place: str, _: Any) -> Any:
        try:
            leaves = [table[place] for table in tables]
        except KeyError:
            raise ValueError(f"the step returned {place} for one sub-batch and not for another") from None
        if place in whole:
            return whole[place]
        return _joined(leaves, samples, weights_of(place) if _is_scalar(leaves[0]) else ())

    return map_leaves(outputs[0], join, "output", kinds[0])


def _is_list_of_samples(value: Any, samples: int) -> bool:
    """Return whether a list has one entry a sample, with tensors that have none: boxes of each image, say."""
    return (
        type(value) in (list, tuple)
        and len(value) == samples
        and any(one.dim() and not has_entries(one, samples) for one in tensors_in(value))
    )


def combined_scalar(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted sum of scalars: tensors give a detached tensor, numbers a number.

    Values with weight 0 are left out: a mean over nothing has no value. Sums of whole numbers stay whole, and so does
    the mean of equal ones.
    """
    terms = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight] or [(math.nan, 1.0)]
    whole = all(weight == 1 for _, weight in terms)
    first = values[0]
    if not isinstance(first, Tensor):
        integers = [value for value, _ in terms if isinstance(value, int)]
        if whole and len(integers) == len(terms):
            return sum(integers)
        if integers == [first] * len(terms) and math.isclose(math.fsum(weight for _, weight in terms), 1.0):
            return first
        return math.fsum(weight * float(value) for value, weight in terms)
    exact = whole and not first.is_floating_point()
    widest = torch.complex128 if first.is_complex() else torch.float64  # half precision would lose what a few parts add
    widest = torch.float32 if first.device.type == "mps" else widest
    total = torch.zeros((), dtype=torch.int64 if exact else widest, device=first.device)
    for value, weight in terms:
        total = total + (torch.as_tensor(value, device=first.device).detach().reshape(()) * (1 if exact else weight))
    return total.to(first.dtype if exact or first.is_floating_point() else torch.float32).reshape(first.shape)


def _joined(leaves: list[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    if _is_scalar(leaves[0]):
        return combined_scalar(leaves, weights)
    if all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        if all(leaf.shape[0] == size for leaf, size in zip(leaves, samples, strict=True)):
            return torch.cat(leaves)
        return leaves
    if all(
        type(leaf).__module__ == "numpy" and leaf.shape[:1] == (size,)
        for leaf, size in zip(leaves, samples, strict=True)
    ):
        return sys.modules["numpy"].concatenate(leaves)
    if all(isinstance(leaf, list | tuple) and len(leaf) == size for leaf, size in zip(leaves, samples, strict=True)):
        return type(leaves[0])(entry for leaf in leaves for entry in leaf)
    plain = isinstance(leaves[0], str | bytes | bool)
    if all(leaf is leaves[0] or (plain and type(leaf) is type(leaves[0]) and leaf == leaves[0]) for leaf in leaves):
        return leaves[0]
    return leaves


def _alike(whole: Tensor, leaf: Tensor) -> bool:
    """Return whether entries can be copied from one to the other, and stay what they are."""
    return (whole.shape[1:], whole.dtype, whole.device) == (leaf.shape[1:], leaf.dtype, leaf.device)


def _is_scalar(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() == 0 and leaf.dtype != torch.bool
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


# BatchNorm under sub-batches: which layers need the whole batch, and what may be done about it.
#
# A BatchNorm layer in train mode normalises with the mean and variance of the batch, so a sub-batch through it gives
# other numbers. Two ways are left:
#
# - ``"offload"`` (the default): no sub-batches while such a layer is there.
# - ``"ghost"``: each sub-batch is normalised by its own statistics, as in ghost batch normalisation (Hoffer, Hubara and
#   Soudry 2017). Other numbers than the plain step's: a choice of the user's.

BatchNormChoice = Literal["offload", "ghost"]


def batch_statistics_layers(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers that take their statistics over the batch: in train mode, or without running ones.

    Frozen layers (``eval()``) are like any other layer.
    """
    return [name for name, module in model.named_modules() if _takes_statistics(module)]


def _takes_statistics(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # it has the methods of a BatchNorm, but is none
        return "BatchNorm" in module.original_name and module.training
    return isinstance(module, BatchNormBase) and _is_live(module)


def _is_live(layer: BatchNormBase) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def fix_statistics(model: nn.Module, layers: Sequence[str]) -> None:
    """Let layers normalise with running statistics, or with mean 0 and variance 1 where they keep none."""
    for name in layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, BatchNormBase)
        if layer.running_mean is None:
            some = next(iter(model.parameters()), torch.zeros(()))
            own_buffers(layer)["running_mean"] = torch.zeros(layer.num_features, device=some.device, dtype=some.dtype)
            own_buffers(layer)["running_var"] = torch.ones(layer.num_features, device=some.device, dtype=some.dtype)
        layer.training = False


@contextmanager
def ghost_momentum(model: nn.Module, parts: int) -> Iterator[None]:
    """Inside, ``parts`` sub-batches move running statistics as much as one batch does outside.

    A layer with momentum m replaces the share m of its running statistics in each forward pass. With
    ``1 - (1 - m) ** (1 / parts)`` in each of ``parts`` passes, the share is m again; the later sub-batches weigh a
    little more than the first. Cumulative averages (``momentum=None``) weigh all passes alike and are left as they are.
    Running variances come from the variances inside sub-batches, which leave out how their means differ.
    """
    layers = [module for module in model.modules() if isinstance(module, BatchNormBase) and _is_live(module)]
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            if layer.momentum is not None:
                # the same as 1 - (1 - m) ** (1 / parts), without losing digits for small m
                layer.momentum = 1.0 if layer.momentum >= 1 else -math.expm1(math.log1p(-layer.momentum) / parts)
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
