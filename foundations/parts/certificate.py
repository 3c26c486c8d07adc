"""What a probe found out about splitting a step's batch, and the exact weights that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retime.foundations.parts.split import batch_size_of
from retime.foundations.parts.weights import Count, Weighting, weights_of

__all__ = ["Certificate", "Example", "NotSeparableError", "WeightsUnclearError", "loss_weights"]

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
