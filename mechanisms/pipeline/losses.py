"""How the loss of a batch comes from those of its micro-batches: seen in the first batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retime.mechanisms.memory.batches import (
    Certificate,
    NotSeparableError,
    Weighting,
    WeightsUnclearError,
    loss_of,
    loss_weights,
    samples_in,
    split_batch,
)
from retime.mechanisms.memory.sandbox import seed_all
from retime.mechanisms.memory.separability import WeightsByFlow, weights_by_flow
from retime.mechanisms.no_effect import NoEffectWarning
from retime.mechanisms.pipeline.errors import PipelineError

__all__ = ["Examples", "certified", "needed_loss", "weights_of"]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION = 3e-2
_FOLLOWED = 5
"""Samples of which operations are followed: one or two may take other operations, as they lie in memory otherwise."""


@dataclass(frozen=True)
class Examples:
    """What a step returned for the first batch, in evaluation mode.

    Attributes:
        whole: for all of it.
        parts: for its micro-batches.
        weights: of their losses.
    """

    whole: Any
    parts: list[Any]
    weights: list[float]


def certified(
    model: nn.Module, step: Callable[[Any], Any], batch: Any, parts: Sequence[Any]
) -> tuple[Certificate, Examples | None]:
    """By what weights a batch's loss is that of its parts: by samples, by what can be counted in them, or as a sum.

    The losses of this batch and of its parts are compared; what the loss is divided by is followed through the step's
    operations, so that it holds for batches with other numbers of padded tokens too. The model is in evaluation mode
    meanwhile, so that dropout and batch statistics do not count. Nothing is kept for gradients, and all runs begin with
    the same random numbers.

    Returns:
        It, and what the step returned; None where that does not tell anything, or for one part.

    Raises:
        PipelineError: no such weights are known.
    """
    if len(parts) == 1:
        return Certificate(None, "the first batch had one micro-batch"), None
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            everything, again = _run(step, batch, 0), _run(step, batch, 1)
            if not _same(everything, again) and not _same(everything, _run(step, batch, 0)):
                raise PipelineError(
                    "the loss of the same batch with the same random numbers changes from call to call: training_step "
                    "keeps a state of its own, and a pipeline calls it once for each micro-batch. Change the state in "
                    "a hook, such as on_train_batch_end"
                )
            outputs = [_run(step, part, 0) for part in parts]
        found = _followed(step, batch)
    finally:
        for module, training in modes.items():
            module.training = training
    whole, losses = _loss(everything), [_loss(output) for output in outputs]
    if not _same(everything, again):
        return _uncompared(found, "the loss draws random numbers"), None
    if not whole.isfinite():
        return _uncompared(found, f"the loss of the first batch is {whole:.6g}"), None
    certificate = _compared(found, whole, losses, parts)
    return certificate, Examples(everything, outputs, weights_of(certificate, parts))


def weights_of(certificate: Certificate, parts: Sequence[Any]) -> list[float]:
    """What each part's loss counts.

    Raises:
        PipelineError: the first batch did not show by what these are weighed.
    """
    if len(parts) == 1:
        return [1.0]
    try:
        return loss_weights(certificate, parts, [samples_in(part) for part in parts])
    except (NotSeparableError, WeightsUnclearError) as error:
        raise PipelineError(
            "micro-batches of this batch cannot be weighed as those of the first one, which is all that a pipeline has "
            f"seen whole ({error}): use microbatches=1, or a loss that is a mean or a sum over samples"
        ) from error


def _followed(step: Callable[[Any], Any], batch: Any) -> WeightsByFlow:
    """What the loss is divided by, as a few samples show it."""
    few = split_batch(batch, _FOLLOWED)[0]
    samples = samples_in(few)
    fewer = split_batch(few, samples // 2 + 1 if samples > 2 else 1)[0]
    return weights_by_flow(lambda part: _run(step, part, 0), few, fewer)


def _uncompared(found: WeightsByFlow, why: str) -> Certificate:
    """Where losses do not tell whether weights fit."""
    if not found.reason:
        return _certificate(found.needed, found)
    warnings.warn(
        f"{why}, so it is not known whether a batch's loss is the mean over its samples; it is taken for that under a "
        "pipeline",
        NoEffectWarning,
        stacklevel=3,
    )
    return Certificate(Weighting("mean"))


def _compared(found: WeightsByFlow, whole: Tensor, losses: Sequence[Tensor], parts: Sequence[Any]) -> Certificate:
    """What operations tell, if it gives this batch's loss; where they do not tell, what gives it."""
    usual = (Weighting("mean"), Weighting("sum"))
    sums = {one: _sum(one, losses, parts) for one in dict.fromkeys((*found.needed, *usual))}
    scale = torch.stack([loss.double().abs() for loss in losses if loss.isfinite()]).max().clamp(min=1e-12)
    tolerance = _TOLERANCE.get(whole.dtype, _LOW_PRECISION) * float(scale)
    fitting = [
        one
        for one, made in sums.items()
        if abs(made - float(whole)) <= tolerance * (len(parts) if one.kind == "sum" else 1)
    ]
    if found.needed and all(one in fitting for one in found.needed):
        return _certificate(found.needed, found)
    known = [one for one in usual if one in fitting]
    if not known:
        tried = ", ".join(f"the {one} is {made:.6g}" for one, made in sums.items())
        raise PipelineError(
            f"the loss of a batch ({float(whole):.6g}) is neither the mean over its samples nor their sum (of "
            f"{len(parts)} micro-batches {tried}), so micro-batches would train something else: use microbatches=1, or "
            "a loss that is a mean or a sum over samples, or a mean over what can be counted in the batch"
        )
    warnings.warn(
        f"under a pipeline the loss is taken for a {known[0]}, as in the first batch; batches with other values may "
        f"need other weights of their micro-batches: {found.reason or f'its operations show a {found.needed[0]}'}. Use "
        "microbatches=1 if that is so",
        NoEffectWarning,
        stacklevel=3,
    )
    return Certificate(known[0])


def _certificate(needed: Sequence[Weighting], found: WeightsByFlow) -> Certificate:
    first, *others = needed
    return Certificate(first, alternatives=tuple(others), complete=found.complete)


def _sum(weighting: Weighting, losses: Sequence[Tensor], parts: Sequence[Any]) -> float:
    """Of the weighed losses; those that count for nothing may have no value."""
    weights = weighting.of(parts, [samples_in(part) for part in parts])
    return sum(weight * float(loss) for weight, loss in zip(weights, losses, strict=True) if weight)


def _run(step: Callable[[Any], Any], part: Any, seed: int) -> Any:
    seed_all(seed)
    try:
        return step(part)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise PipelineError(
            "training_step differentiates by itself, which needs the layers of all ranks: a pipeline has no gradients "
            f"inside of a step ({error})"
        ) from error


def _same(one: Any, other: Any) -> bool:
    return torch.allclose(_loss(one), _loss(other), rtol=0, atol=0, equal_nan=True)


def needed_loss(output: Any) -> Tensor:
    """The loss in what a step returned.

    Raises:
        PipelineError: there is none.
    """
    try:
        return loss_of(output)
    except ValueError as error:
        raise PipelineError(
            f"training_step gave no loss for a micro-batch ({error}), and a pipeline cannot skip batches: return "
            "0 * loss in place of None"
        ) from error


def _loss(output: Any) -> Tensor:
    return needed_loss(output).detach()
