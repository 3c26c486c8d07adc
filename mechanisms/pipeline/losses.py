"""How the loss of a batch comes from those of its micro-batches: seen in the first batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retime.mechanisms.memory.batches import loss_of, samples_in
from retime.mechanisms.memory.sandbox import seed_torch
from retime.mechanisms.no_effect import NoEffectWarning
from retime.mechanisms.pipeline.errors import PipelineError

__all__ = ["Examples", "Reduction", "reduction_of", "weights_of"]

Reduction = Literal["mean", "sum"]
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION = 3e-2


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


def reduction_of(
    model: nn.Module, step: Callable[[Any], Any], batch: Any, parts: Sequence[Any]
) -> tuple[Reduction, Examples | None]:
    """Whether a batch's loss is the mean of its parts' losses, weighed by samples, or their sum.

    The model is in evaluation mode meanwhile, so that dropout and batch statistics do not count. All runs are without
    gradients, and begin with the same random numbers.

    Returns:
        It, and what the step returned; None where it draws random numbers, or for one part.

    Raises:
        PipelineError: it is neither.
    """
    if len(parts) == 1:
        return "mean", None
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
    finally:
        for module, training in modes.items():
            module.training = training
    whole, losses = _loss(everything), [_loss(output) for output in outputs]
    if not _same(everything, again):
        warnings.warn(
            "the loss draws random numbers, so it is not known whether a batch's loss is the mean over its samples; it "
            "is taken for that under a pipeline",
            NoEffectWarning,
            stacklevel=2,
        )
        return "mean", None
    if not whole.isfinite():
        warnings.warn(
            f"the loss of the first batch is {whole:.6g}, so it is not known whether a batch's loss is the mean over "
            "its samples; it is taken for that under a pipeline",
            NoEffectWarning,
            stacklevel=2,
        )
        return "mean", None
    tolerance = _TOLERANCE.get(whole.dtype, _LOW_PRECISION)
    whole, losses = whole.double(), [loss.double() for loss in losses]
    mean = torch.stack([w * loss for w, loss in zip(weights_of("mean", parts), losses, strict=True)]).sum()
    scale = torch.stack([loss.abs() for loss in losses]).max().clamp(min=1e-12)
    if (mean - whole).abs() <= tolerance * scale:
        return "mean", Examples(everything, outputs, weights_of("mean", parts))
    total = torch.stack(losses).sum()
    if (total - whole).abs() <= tolerance * scale * len(parts):
        return "sum", Examples(everything, outputs, weights_of("sum", parts))
    raise PipelineError(
        f"the loss of a batch ({whole:.6g}) is neither the mean over its samples ({mean:.6g} from {len(parts)} "
        f"micro-batches) nor their sum ({total:.6g}), so micro-batches would train something else: use microbatches=1, "
        "or a loss that is a mean or a sum over samples"
    )


def weights_of(reduction: Reduction, parts: Sequence[Any]) -> list[float]:
    """What each part's loss counts."""
    if reduction == "sum":
        return [1.0] * len(parts)
    samples = [samples_in(part) for part in parts]
    return [count / sum(samples) for count in samples]


def _run(step: Callable[[Any], Any], part: Any, seed: int) -> Any:
    seed_torch(seed)
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


def _loss(output: Any) -> Tensor:
    try:
        return loss_of(output).detach()
    except ValueError as error:
        raise PipelineError(f"training_step gave no loss: {error}") from error
