"""Numbers that sub-batches log, put together to what ``training_step`` would have logged for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from retime.mechanisms.memory.batches import Certificate, Weighting, combined_scalar
from retime.mechanisms.memory.step import SubBatches

LOGGED = "logged"
"""Under this key a step returns what it logged, so that a certificate learns how each number adds up."""

How: TypeAlias = Literal["weights", "batch_size", "samples", "sum", "max", "min"]

_SUM = Weighting("sum")
_SAID: dict[How, str] = {
    "weights": "the mean over {them}, weighed by samples or as the loss",
    "samples": "the mean over {them}, weighed by samples",
    "batch_size": "the mean over {them}, weighed by the batch_size that each gave",
    "sum": "the sum over {them}, as its reduce_fx says",
    "max": "the maximum over {them}, as its reduce_fx says",
    "min": "the minimum over {them}, as its reduce_fx says",
}


def place_of(key: str) -> str:
    """Where a certificate finds what is logged under this key."""
    return f"output['{LOGGED}'][{key!r}]"


@dataclass(frozen=True)
class LoggedNumber:
    """The n-th call of ``log`` with one name, as it is the same in all batches.

    Args:
        name: that is logged.
        call: how often the same part logged that name before.
        reduction: ``reduce_fx`` in one word.
        sized: a ``batch_size`` is given.
        by_epoch: the batch's size matters, since a mean over batches is weighed by it.
    """

    name: str
    call: int
    reduction: str
    sized: bool
    by_epoch: bool

    @classmethod
    def of(cls, name: str, call: int, options: dict[str, Any]) -> LoggedNumber:
        reduce_fx = options.get("reduce_fx", "mean")
        reduction = (reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")).lower()
        sized = options.get("batch_size") is not None
        return cls(name, call, reduction, sized, bool(options.get("on_epoch")) and reduction in ("mean", "avg"))

    @property
    def key(self) -> str:
        return self.name if not self.call else f"{self.name} (call {self.call + 1})"

    @property
    def place(self) -> str:
        return place_of(self.key)

    @property
    def size_place(self) -> str:
        return place_of(self._size_key)

    @property
    def _size_key(self) -> str:
        return f"batch_size of {self.key}"

    @property
    def _samples_key(self) -> str:
        return f"batch_size of {self.key}, plus samples"

    @property
    def _product_key(self) -> str:
        return f"{self.key} times its batch_size"

    @property
    def _zero_key(self) -> str:
        return f"samples where {self.key} is 0"

    @property
    def helpers(self) -> tuple[str, ...]:
        """Places of what is only there to find out about others."""
        return place_of(self._samples_key), place_of(self._product_key), place_of(self._zero_key)

    def probed(self, value: Any, size: Any, samples: int) -> dict[str, Any]:
        """What a certificate needs to find out how the number adds up, by key.

        A mean over something that only the user counts, such as valid tokens, is no sum of the parts' means with any
        weights that a certificate knows, but times the ``batch_size`` it is a plain sum. Sizes are told from settings,
        which are the same for any part, where they are 0 too: with the samples added only sizes still add up. Of a
        value that is 0 nothing can be said (hits of an untrained model: a mean, or a sum?), which has to be known.
        """
        number = value if isinstance(value, Tensor) else float(value)
        found = {self.key: number, self._zero_key: _where(number == 0, float(samples), 1.0, number)}
        if self.sized:
            found[self._size_key] = size
            found[self._samples_key] = size + samples
            found[self._product_key] = _product(number, size)
        return found

    def how(self, certificate: Certificate) -> How:
        """How the values of all parts are put together."""
        if self._mean_by_size(certificate):
            return "batch_size"
        if self._seen(certificate):
            return "weights"
        by_name: dict[str, How] = {"sum": "sum", "max": "max", "min": "min"}
        return by_name.get(self.reduction, "batch_size" if self.sized else "samples")

    def certified(self, certificate: Certificate) -> bool:
        """Whether that gives the whole batch's value, as far as all parts log one."""
        return self._mean_by_size(certificate) or self._seen(certificate)

    def was_zero(self, certificate: Certificate) -> bool:
        """The certificate has seen no other value, so it cannot tell sums from means."""
        return certificate.outputs.get(place_of(self._zero_key)) == _SUM

    def _seen(self, certificate: Certificate) -> bool:
        return self.place in certificate.outputs and not self.was_zero(certificate)

    def setting(self, certificate: Certificate) -> bool:
        """The ``batch_size`` is the same for the whole batch as for any part."""
        return self.size_place in certificate.outputs and not self._size_adds_up(certificate)

    def size_certified(self, certificate: Certificate) -> bool:
        """Whether the whole batch's ``batch_size`` is known."""
        return self.size_place in certificate.outputs or self._size_adds_up(certificate)

    def _size_adds_up(self, certificate: Certificate) -> bool:
        return certificate.outputs.get(place_of(self._samples_key)) == _SUM

    def _mean_by_size(self, certificate: Certificate) -> bool:
        product = certificate.outputs.get(place_of(self._product_key))
        return self.sized and product == _SUM and self._size_adds_up(certificate)


@dataclass
class LoggedCall:
    """What the parts of one batch gave to the n-th call of ``log`` with one name: values and sizes by part."""

    number: LoggedNumber
    options: dict[str, Any]
    values: dict[int, Any] = field(default_factory=dict)
    sizes: dict[int, Any] = field(default_factory=dict)

    def put(self, part: int, value: Any, size: Any) -> None:
        self.values[part], self.sizes[part] = value, size

    def value(self, parts: SubBatches) -> tuple[Any, str]:
        """The whole batch's value, and where that is in doubt, what it is."""
        values, which = list(self.values.values()), list(self.values)
        if len(parts) == 1 or not all(map(is_number, values)):  # Lightning has an error for what is no number
            return values[0], ""
        how, sure = self.number.how(parts.certificate), self.number.certified(parts.certificate)
        if how == "weights":
            weights, complete = shares(parts, self.number.place, which)
            if complete:
                return combined_scalar(values, weights), ""
            how, sure = "batch_size" if self.number.sized else "weights", False
        doubt = "" if sure else said(how, len(values) < len(parts), was_zero=self.number.was_zero(parts.certificate))
        if doubt and len(values) == len(parts) and self.number.was_zero(parts.certificate):
            doubt = doubt if len({float(value) for value in values}) > 1 else ""  # still 0, or a setting
        if how == "max" or how == "min":
            return _extreme(values, how), doubt
        return combined_scalar(values, self._weights(how, parts, which)), doubt

    def _weights(self, how: How, parts: SubBatches, which: Sequence[int]) -> list[float]:
        if how == "sum":
            return [1.0] * len(which)
        if how == "weights":
            return shares(parts, self.number.place, which)[0]
        samples = [float(parts.samples[part]) for part in which]
        by_size = how == "batch_size" and self._sized()
        return _normalised([float(size) for size in self.sizes.values()] if by_size else samples, samples)

    def size(self, parts: SubBatches) -> Any:
        """The whole batch's ``batch_size``; None where Lightning is to look at the batch."""
        sizes = list(self.sizes.values())
        if not self._sized():
            return None
        return sizes[0] if len(parts) == 1 or self.number.setting(parts.certificate) else sum(sizes)

    def _sized(self) -> bool:
        return all(size is not None for size in self.sizes.values())


def shares(parts: SubBatches, place: str, which: Sequence[int]) -> tuple[list[float], bool]:
    """Weights for the scalars of some parts, and whether they give the whole batch's scalar.

    They do where the other parts have nothing to add: in sums, and in means over what these parts have none of.
    """
    weights = parts.weights_of(place)
    some = [weights[part] for part in which]
    known = parts.certificate.outputs.get(place)
    missing = sum(weight != 0 for part, weight in enumerate(weights) if part not in which)
    if not missing or known == _SUM:
        return some, known is not None
    return _normalised(some, [parts.samples[part] for part in which]), False


def said(how: How, some_only: bool = False, was_zero: bool = False) -> str:
    """What a value is that may not be the whole batch's, and why."""
    if some_only:
        return (
            f"was logged by some sub-batches only, and is {_SAID[how].format(them='those')}: the whole batch may have "
            "logged another"
        )
    why = "it was 0 in all samples that were examined" if was_zero else "no sum of their values gave the whole batch's"
    return f"is {_SAID[how].format(them='sub-batches')}: {why}"


def is_number(value: Any) -> bool:
    """What Lightning can log, other than metrics."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _normalised(raw: Sequence[float], otherwise: Sequence[float]) -> list[float]:
    counted = raw if sum(raw) else otherwise
    return [value / sum(counted) for value in counted]


def _product(number: Any, size: Any) -> Any:
    """0 where there is nothing: a mean over no tokens has no value."""
    product = number * size
    return _where(size == 0, 0.0, product, product)


def _where(test: Any, one: Any, other: Any, like: Any) -> Any:
    """One or the other, without a look at a tensor's values, which dry runs do not have; of the dtype of ``like``."""
    if isinstance(test, Tensor):
        # Plain numbers would have the default dtype, and a low one makes a probe think that it computes in it.
        dtype = like.dtype if isinstance(like, Tensor) else test.dtype
        one, other = (torch.as_tensor(value, dtype=dtype, device=test.device) for value in (one, other))
        return torch.where(test, one, other)
    return one if test else other


def _extreme(values: Sequence[Any], how: How) -> Any:
    if not any(isinstance(value, Tensor) for value in values):
        return max(values) if how == "max" else min(values)
    device = next(value.device for value in values if isinstance(value, Tensor))
    stacked = torch.stack([torch.as_tensor(value, device=device) for value in values])
    return stacked.amax() if how == "max" else stacked.amin()
