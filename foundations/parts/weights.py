"""How the losses of sub-batches add up to the loss of their batch: by samples, as a sum, or by what can be counted.

The paper adds the gradients of equal sub-batches (moDNN, section 4.2), which is Eq. 4 as long as the loss is a mean
over samples. A loss that is a mean over anything else, such as the tokens that are not padding, needs other weights.
They must be known before the backward pass of the first sub-batch, so they have to be countable in the batch itself.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from retime.foundations.parts.split import batch_size_of, tensors_of

_COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    "!=": operator.ne,
    "==": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
OPPOSITE = {"!=": "==", "==": "!=", ">": "<=", ">=": "<", "<": ">=", "<=": ">"}
COMPARED = {"ne": "!=", "eq": "==", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
"""Comparisons, by the names of the operations."""


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
    """

    place: str
    comparison: str
    value: float = 0
    cut: tuple[tuple[str, tuple[int, ...]], ...] = ()
    least: float | None = None
    added: float = 0
    needed: bool = False

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
        return [part / whole for part in parts] if whole else normalised(samples, samples)


@dataclass(frozen=True)
class Weighting:
    """How to weigh the parts of a batch so that their losses add up to the batch's.

    Args:
        kind: ``"mean"`` by samples, ``"sum"`` with weight 1, ``"count"`` by ``count`` of each part.
        count: for ``"count"``: a :class:`Count`, or any function from a part to a number.
    """

    kind: Literal["mean", "sum", "count"]
    count: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if (self.kind == "count") != (self.count is not None):
            raise ValueError(f"Weighting({self.kind!r}, count={self.count}): count goes with kind 'count', and only it")

    def of(self, parts: Sequence[Any], samples: Sequence[int]) -> list[float]:
        """The weight of each part; they add up to 1, but for kind ``"sum"`` and counts with a least value.

        Where nothing is counted in the whole batch the parts are weighed by samples: the loss has no value then, which
        the step shows with these weights too.
        """
        return weights_of([self], parts, samples)[0]

    def raw(self, parts: Sequence[Any], samples: Sequence[int]) -> list[Any]:
        """What each part counts, before it is divided by the total: numbers, or scalars on the parts' device."""
        if self.count is not None:
            return [self.count(part) for part in parts]
        return [1.0] * len(parts) if self.kind == "sum" else list(samples)

    def __str__(self) -> str:
        return {"mean": "mean over samples", "sum": "sum over samples"}.get(self.kind, f"mean over {self.count}")


def weights_of(weightings: Sequence[Weighting], parts: Sequence[Any], samples: Sequence[int]) -> list[list[float]]:
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
    """Whether the gradient of a batch is a weighted sum of those of its parts, and by which weights.

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
        unclear: places of the scalars for which no way to add them up was found.
        examples: the scalars themselves, for callers that combine several of them.
        notes: what else a user should know.
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
    unclear: tuple[str, ...] = ()
    examples: tuple[Example, ...] = ()
    notes: tuple[str, ...] = ()
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
    """What to multiply the loss of each part by, so that the gradients add up to the batch's.

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
        weights, *others = weights_of([weighting, *certificate.alternatives], parts, sizes)
    except LookupError as error:
        raise WeightsUnclearError(str(error)) from error
    for other, different in zip(certificate.alternatives, others, strict=True):
        if any(abs(one - two) > _SAME for one, two in zip(weights, different, strict=True)):
            raise WeightsUnclearError(
                f"the loss adds up a {weighting} and a {other}, which weigh the parts of this batch differently"
            )
    return weights
