"""Numbers that sub-batches log, put together to what ``training_step`` would have logged for the whole batch.

The batch's number is a weighted sum of its parts' numbers: by the loss's weights, by samples, as a plain sum, or by
the ``batch_size`` that each part gave. Which of them holds is seen in the small batches that a certificate was given
for, whole and in parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from retime.foundations.parts import Certificate, Example, combined_scalar, normalised
from retime.mechanisms.memory_budget import SubBatches

LOGGED = "logged"
"""Under this key a step returns what it logged, so that a certificate has examples of it."""

By: TypeAlias = Literal["weights", "batch_size", "samples", "sum", "max", "min"]

_TEXTS: dict[By, str] = {
    "weights": "the mean over {them}, weighed by samples or as the loss",
    "samples": "the mean over {them}, weighed by samples",
    "batch_size": "the mean over {them}, weighed by the batch_size that each gave",
    "sum": "the sum over {them}, as its reduce_fx says",
    "max": "the maximum over {them}, as its reduce_fx says",
    "min": "the minimum over {them}, as its reduce_fx says",
}
_MEANS = ("mean", "avg")
_EXTREMES: tuple[By, ...] = ("max", "min")
_SIZE_IN_DOUBT = (
    "has the sum of the sub-batches' batch_size as its weight in an epoch's mean: they did not add up to the whole's"
)


def place_of(key: str) -> str:
    """Where a certificate finds what is logged under this key."""
    return f"output['{LOGGED}'][{key!r}]"


def shares(
    by: By, batch: SubBatches | Example, which: Sequence[int], sizes: Sequence[float] = ()
) -> tuple[list[float], bool]:
    """Weights for the numbers of some parts, and whether they give the whole batch's number.

    They do where the other parts have nothing to add: in sums, and in means over what these parts have all of.

    Args:
        by: what weighs them; ``"max"`` and ``"min"`` have no weights.
        batch: the parts' samples, and the weights of their losses.
        which: parts that gave a number.
        sizes: the ``batch_size`` of each of those.
    """
    samples = [batch.samples[part] for part in which]
    if by == "batch_size":
        return normalised(sizes, samples), True
    everything = list(batch.weights) if by == "weights" else normalised(batch.samples, batch.samples)
    if by == "sum" or all(weight == 1 for weight in everything):
        return [1.0] * len(which), True
    some = [everything[part] for part in which]
    complete = not any(weight for part, weight in enumerate(everything) if part not in which)
    return some if complete else normalised(some, samples), complete


def fitting(certificate: Certificate, place: str, size_place: str | None = None, reduction: str = "mean") -> list[By]:
    """How this number adds up in all examples, the most telling way first; all ways where it is always 0.

    Args:
        reduction: of an epoch's values: where it is a maximum or minimum, a batch's value may be one too.
    """
    examples = certificate.examples
    if all(place not in example.whole for example in examples):
        return []
    ways: list[By] = ["weights", "samples", "sum"]
    ways += [by for by in _EXTREMES if by == reduction]
    if size_place is not None:
        ways.insert(0, "batch_size")
    return [by for by in ways if all(_fits(by, one, place, size_place, certificate.tolerance) for one in examples)]


def _fits(by: By, example: Example, place: str, size_place: str | None, tolerance: float) -> bool:
    numbers, sizes = _scalars(example, place), _scalars(example, size_place) if size_place is not None else []
    if by == "batch_size" and sum(sizes) != example.whole.get(str(size_place)):
        return False
    if by == "batch_size" and not sum(sizes):  # a mean over nothing has no value
        return True
    if by in _EXTREMES:
        return (max if by == "max" else min)(numbers) == example.whole.get(place)
    weights, _ = shares(by, example, range(len(numbers)), sizes)
    terms = [weight * number for weight, number in zip(weights, numbers, strict=True) if weight]
    whole = example.whole.get(place, math.nan)
    return abs(math.fsum(terms) - whole) <= tolerance * (abs(whole) + math.fsum(map(abs, terms)))


def _scalars(example: Example, place: str) -> list[float]:
    return [part.get(place, math.nan) for part in example.parts]


@dataclass
class LoggedNumber:
    """The n-th call of ``log`` with one name, and what the parts of a batch gave it.

    Attributes:
        name: that is logged.
        call: how often the same part logged that name before.
        options: of ``log``, but for ``batch_size``.
        sized: a ``batch_size`` is given.
        values: by part.
        sizes: by part; None where Lightning is to look at the batch.
    """

    name: str
    call: int
    options: dict[str, Any]
    sized: bool
    values: dict[int, Any] = field(default_factory=dict)
    sizes: dict[int, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.name if not self.call else f"{self.name} (call {self.call + 1})"

    @property
    def size_key(self) -> str:
        return f"batch_size of {self.key}"

    def value(self, parts: SubBatches) -> tuple[Any, str]:
        """The whole batch's value, and where that is in doubt, what it is instead."""
        values, which = list(self.values.values()), list(self.values)
        if len(parts) == 1 or not all(map(is_number, values)):  # Lightning has an error for what is no number
            return values[0], ""
        ways, some_only = self._fitting(parts.certificate), len(which) < len(parts)
        always_0 = _always_0(ways)
        was_same = not always_0 and self._was_same(parts.certificate)
        alike = len({float(value) for value in values}) == 1
        known = bool(ways) and not always_0 and (alike or not was_same)
        by, certain = (ways[0], True) if known else (self._assumed, False)
        weights, complete = self._shares(by, parts)
        if certain and not complete:
            by, certain = by if by in _EXTREMES else "batch_size" if self.sized else "weights", False
            weights, _ = self._shares(by, parts)
        plain = not parts.certificate.reads and not any(isinstance(value, Tensor) for value in values)
        setting = alike and plain and self._reduction in _MEANS  # a number that was read from a tensor may be a count
        usual = always_0 and not some_only and (setting or not any(map(float, values)))
        doubt = "" if certain or usual else _doubt(by, some_only, always_0, was_same)
        return _extreme(values, by) if by in _EXTREMES else combined_scalar(values, weights), doubt

    def size(self, parts: SubBatches) -> Any:
        """The whole batch's ``batch_size``; None where Lightning is to look at the batch."""
        sizes = list(self.sizes.values())
        if any(size is None for size in sizes):
            return None
        return sizes[0] if len(parts) == 1 or self._size_is(parts.certificate) == "same" else sum(sizes)

    def doubt(self, certificate: Certificate) -> str:
        """What the examples leave open, before anything is logged."""
        if not certificate.examples or place_of(self.key) not in certificate.examples[0].whole:
            return ""
        ways = self._fitting(certificate)
        if not ways:
            return _doubt(self._assumed)
        by_epoch = self.options.get("on_epoch") and self._reduction in _MEANS
        return _SIZE_IN_DOUBT if by_epoch and self.sized and not self._size_is(certificate) else ""

    @property
    def _reduction(self) -> str:
        reduce_fx = self.options.get("reduce_fx", "mean")
        return (reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")).lower()

    @property
    def _assumed(self) -> By:
        """How numbers add up that no example tells of."""
        by_name: dict[str, By] = {"sum": "sum", "max": "max", "min": "min"}
        return by_name.get(self._reduction, "batch_size" if self.sized else "samples")

    def _fitting(self, certificate: Certificate) -> list[By]:
        size_place = place_of(self.size_key) if self.sized else None
        return fitting(certificate, place_of(self.key), size_place, self._reduction)

    def _was_same(self, certificate: Certificate) -> bool:
        """Whether all examples gave the same for all of a batch and for each part: a mean then, or a maximum."""
        place = place_of(self.key)
        return all({*_scalars(example, place)} == {example.whole.get(place)} for example in certificate.examples)

    def _shares(self, by: By, parts: SubBatches) -> tuple[list[float], bool]:
        sizes = [0.0 if size is None else float(size) for size in self.sizes.values()] if by == "batch_size" else []
        return shares(by, parts, list(self.values), sizes)

    def _size_is(self, certificate: Certificate) -> str:
        """``"sum"`` of the parts' sizes, the ``"same"`` for all of them, or neither."""
        place = place_of(self.size_key)
        pairs = [(example.whole.get(place), _scalars(example, place)) for example in certificate.examples]
        if all(sum(sizes) == whole for whole, sizes in pairs):
            return "sum"
        return "same" if all({*sizes} == {whole} for whole, sizes in pairs) else ""


def _always_0(ways: Sequence[By]) -> bool:
    """Only zeros are both a sum and a mean."""
    return "sum" in ways and "samples" in ways


def _doubt(by: By, some_only: bool = False, always_0: bool = False, was_same: bool = False) -> str:
    """What a value is that may not be the whole batch's, and why."""
    if some_only:
        return (
            f"was logged by some sub-batches only, and is {_TEXTS[by].format(them='those')}: the whole batch may have "
            "logged another"
        )
    if always_0 or was_same:
        why = f"it was {'0' if always_0 else 'the same'} in all samples that were examined"
    else:
        why = "no sum of their values gave the whole batch's"
    return f"is {_TEXTS[by].format(them='sub-batches')}: {why}"


def is_number(value: Any) -> bool:
    """What Lightning can log, other than metrics."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _extreme(values: Sequence[Any], by: By) -> Any:
    device = values[0].device if isinstance(values[0], Tensor) else "cpu"
    tensors = torch.stack([torch.as_tensor(value, device=device) for value in values])
    return tensors.amax() if by == "max" else tensors.amin()
