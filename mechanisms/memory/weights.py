"""How the losses of sub-batches add up to the loss of their batch: by samples, as a sum, or by what can be counted.

The paper adds the gradients of equal sub-batches (moDNN, section 4.2), which is Eq. 4 as long as the loss is a mean
over samples. A loss that is a mean over anything else, such as the tokens that are not padding, needs other weights.
They must be known before the backward pass of the first sub-batch, so they have to be countable in the batch itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from retime.mechanisms.memory.split import tensors_of

__all__ = ["Count", "Weighting", "counts_of"]

_COMPARISONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "!=": operator.ne,
    "==": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True)
class Count:
    """Something that can be counted in a part of a batch: entries of one tensor that compare so, or their sum.

    Args:
        place: of the tensor, as :func:`~retime.mechanisms.memory.split.tensors_of` names it.
        comparison: ``"!="``, ``"=="``, ``">"``, ``">="``, ``"<"``, ``"<="`` with ``value``, or ``"sum"`` of entries.
        skip_first: leave out the first entry of each row, as models do that predict the next token.
    """

    place: str
    comparison: str
    value: float = 0
    skip_first: bool = False

    def __call__(self, part: Any) -> Tensor:
        """The number in this part, as a float64 scalar on the tensor's device.

        Raises:
            LookupError: the part has no such tensor.
        """
        return self.per_sample(part).sum()

    def per_sample(self, part: Any) -> Tensor:
        """The number in each entry of the first dimension, in float64."""
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
        return rows.sum(1, dtype=torch.float64)

    def __str__(self) -> str:
        where = f"{self.place}[:, 1:]" if self.skip_first else self.place
        if self.comparison == "sum":
            return f"sum({where})"
        return f"count({where} {self.comparison} {self.value:g})"


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
        return normalised(self.raw(parts, samples).tolist(), samples) if self.kind != "sum" else [1.0] * len(parts)

    def raw(self, parts: Sequence[Any], samples: Sequence[int]) -> Tensor:
        """What each part counts, before it is divided by the total: float64, one entry a part."""
        if self.count is not None:
            counted = [torch.as_tensor(self.count(part), dtype=torch.float64) for part in parts]
            return torch.stack([value.detach().reshape(()) for value in counted]).cpu()  # one transfer for all parts
        return torch.tensor([1.0] * len(parts) if self.kind == "sum" else samples, dtype=torch.float64)

    def __str__(self) -> str:
        return {"mean": "mean over samples", "sum": "sum over samples"}.get(self.kind, f"mean over {self.count}")


def normalised(raw: Sequence[float], samples: Sequence[int]) -> list[float]:
    """Shares of the total; by samples where the total is 0."""
    total = sum(raw)
    if total == 0:
        raw, total = samples, sum(samples)
    return [value / total for value in raw]


def counts_of(batch: Any, compared: set[tuple[str, float]]) -> list[Count]:
    """What could weigh the parts of this batch: candidates, most specific first.

    Args:
        batch: a batch whose tensors have shape ``(B, ...)``.
        compared: comparisons with constants that the step makes with integers, such as ``("!=", -100)``.
    """
    found = []
    for place, tensor in tensors_of(batch).items():
        if not tensor.dim() or tensor.is_complex():
            continue
        integer = not tensor.is_floating_point()
        rules = sorted(compared) if integer and tensor.dtype != torch.bool else []
        if tensor.dtype == torch.bool:
            rules = [("==", 0.0), ("==", 1.0)]
        elif tensor.dim() <= 3 and bool((tensor >= 0).all()):
            rules = [*rules, ("sum", 0.0)]  # a mask, lengths, or the weights of samples
        for skip in (False, True) if tensor.dim() > 1 and tensor.shape[1] > 1 else (False,):
            found += [Count(place, comparison, value, skip) for comparison, value in rules]
    return found
