"""How the losses of sub-batches add up to the loss of their batch: by samples, as a sum, or by what can be counted.

The paper adds the gradients of equal sub-batches (moDNN, section 4.2), which is Eq. 4 as long as the loss is a mean
over samples. A loss that is a mean over anything else, such as the tokens that are not padding, needs other weights.
They must be known before the backward pass of the first sub-batch, so they have to be countable in the batch itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        skip_first: leave out the first entry of each row, as models do that predict the next token.
    """

    place: str
    comparison: str
    value: float = 0
    skip_first: bool = False

    def __call__(self, part: Any) -> Tensor:
        """The number in this part, as a scalar on the tensor's device.

        Raises:
            LookupError: the part has no such tensor.
        """
        return self.per_sample(part).sum()

    def per_sample(self, part: Any) -> Tensor:
        """The number in each entry of the first dimension: whole numbers, or float64 for a sum of fractions."""
        tensor = tensors_of(part).get(self.place)
        if tensor is None:
            raise LookupError(
                f"{self} was found to weigh sub-batches, but this batch has no {self.place}: certify again with it"
            )
        if self.skip_first:
            tensor = tensor[:, 1:]
        if self.comparison != "sum":
            tensor = _COMPARISONS[self.comparison](tensor, self.value)
        rows = tensor.detach().reshape(len(tensor), -1) if tensor.dim() else tensor.detach().reshape(1, 1)
        exact = not rows.is_floating_point()
        return rows.sum(1, dtype=torch.int64 if exact else None if rows.device.type == "mps" else torch.float64)

    def all_in(self, part: Any) -> bool:
        """Whether all entries that this part has compare so.

        Raises:
            LookupError: the part has no such tensor.
        """
        counted = int(self(part))
        return counted == tensors_of(part)[self.place].numel()

    def opposite(self) -> Count:
        """All other entries."""
        if self.value == 1 and self.comparison == "==":  # of truth values
            return replace(self, value=0.0)
        return replace(self, comparison=OPPOSITE[self.comparison])

    def __str__(self) -> str:
        where = f"{self.place}[:, 1:]" if self.skip_first else self.place
        if self.comparison == "sum":
            return f"sum({where})"
        return f"count({where} {self.comparison} {self.value:g})"


def compares(one: float, comparison: str, other: float) -> bool:
    """Whether two numbers compare so."""
    return bool(_COMPARISONS[comparison](one, other))


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
        """The weight of each part; they add up to 1, except for kind ``"sum"``.

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
    known = iter(torch.stack([value.to(device, widest) for value in counted]).tolist() if counted else [])
    rows = [[next(known) if isinstance(value, Tensor) else float(value) for value in row] for row in raw]
    return [
        row if weighting.kind == "sum" else normalised(row, samples)
        for weighting, row in zip(weightings, rows, strict=True)
    ]


def normalised(raw: Sequence[float], samples: Sequence[int]) -> list[float]:
    """Shares of the total; by samples where the total is 0."""
    total = sum(raw)
    if total == 0:
        raw, total = samples, sum(samples)
    return [value / total for value in raw]


def counts_of(batch: Any, compared: set[tuple[str, str, float]]) -> list[Count]:
    """What could weigh the parts of this batch: candidates in the order of its tensors.

    Args:
        batch: a batch whose tensors have shape ``(B, ...)``.
        compared: comparisons with constants that the step makes, by place: ``("batch['labels']", "!=", -100)``.
    """
    found = []
    for place, tensor in tensors_of(batch).items():
        if not tensor.dim() or tensor.is_complex():
            continue
        rules = [(comparison, value) for where, comparison, value in sorted(compared) if where == place]
        if tensor.dtype == torch.bool:
            rules = [("==", 0.0), ("==", 1.0)]
        elif tensor.dim() <= 3 and bool((tensor >= 0).all()):
            rules.append(("sum", 0.0))  # a mask, lengths, or the weights of samples
        for skip in (False, True) if tensor.dim() > 1 and tensor.shape[1] > 1 else (False,):
            found += [Count(place, comparison, value, skip) for comparison, value in rules]
    return found


# What a probe found out about splitting a step's batch, and the exact weights that follow from it.

_SAME = 1e-9  # counts are exact in float64, and weights are at most 1


class NotSeparableError(RuntimeError):
    """Sub-batches would not give the batch's gradient; the message says why and what to do instead."""


class WeightsUnclearError(RuntimeError):
    """Two ways to weigh sub-batches, equal on the batch that was probed, differ on this one: certify again with it."""


@dataclass(frozen=True)
class Example:
    """The scalars that a probed step returned, by place, for a small batch and for its parts.

    Attributes:
        whole: of the batch.
        parts: of each part.
        samples: of each part.
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
        alternatives: further weightings that fit the probes as well. They agreed on the probed batches;
            :func:`loss_weights` compares them on every batch.
        outputs: how each scalar that the step returns, by place (``output['loss']``), adds up from parts.
        unclear: places of the scalars for which no way to add them up was found.
        examples: the scalars themselves, for callers that combine several of them.
        notes: what else a user should know.
        constants: the weights follow from what entries of the batch are compared with.
        sizes: of the batches, in samples, with which the step is known to do the same.
        reads: the numbers that the probed step read from tensors, in order; None where it read something else.
        complete: counts that have to count all entries there are, since the loss is a mean over some of those.
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
    complete: tuple[Count, ...] = ()
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
        parts: all parts of one batch.
        samples: how many samples each has; None asks :func:`~retime.foundations.parts.split.batch_size_of`.

    Raises:
        NotSeparableError: the certificate says that no weights exist.
        WeightsUnclearError: this batch tells apart what the probed batch did not, or lacks what was counted: certify
            again with this batch, and with ``among=certificate``.
    """
    weighting = certificate.weighting
    if weighting is None:
        raise NotSeparableError(certificate.reason)
    sizes = [batch_size_of(part) for part in parts] if samples is None else list(samples)
    try:
        lacking = [str(count) for count in certificate.complete if not all(map(count.all_in, parts))]
        weights, *others = weights_of([weighting, *certificate.alternatives], parts, sizes)
    except LookupError as error:
        raise WeightsUnclearError(str(error)) from error
    if lacking:
        raise WeightsUnclearError(f"{lacking[0]} was found to count all entries, and does not in this batch")
    for other, different in zip(certificate.alternatives, others, strict=True):
        if any(abs(one - two) > _SAME for one, two in zip(weights, different, strict=True)):
            raise WeightsUnclearError(
                f"the loss may be a {weighting} or a {other}: both fitted the {certificate.samples} samples that were "
                "probed, but they weigh the parts of this batch differently. Certify again with this batch"
            )
    return weights
