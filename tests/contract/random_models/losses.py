"""What a random model is trained for."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contract.random_models.layers import Batch

LOSSES: dict[str, Callable[[Any, Tensor, Tensor, Batch], Tensor]] = {}
COUNTS: dict[str, Callable[[Any], Any]] = {
    "clamped": lambda batch: Batch(*batch).mask.sum().clamp(min=1),
    "epsilon": lambda batch: Batch(*batch).mask.sum() + 1e-3,
    "maxed": lambda batch: max(1, int(Batch(*batch).mask.sum())),
    "rows": lambda batch: max(1, Batch(*batch).mask.nonzero().shape[0]),
    "normalised": lambda batch: Batch(*batch).mask.mean().clamp(min=0.1) * Batch(*batch).mask.numel(),
}
"""What losses divide by, of which batches may have nothing."""


def loss_of(model: Any, name: str, batch: Any) -> Tensor:
    """One number for a batch, in the model's own dtype."""
    scores, features = model(batch)
    loss = LOSSES[name](model, scores.float() if scores.dtype == torch.bfloat16 else scores, features, Batch(*batch))
    return loss + 1e-3 * scores.square().mean() if name in ("mean", "sum_and_mean") else loss


def _named(name: str) -> Any:
    def keep(function: Any) -> Any:
        LOSSES[name] = function
        return function

    return keep


@_named("mean")
def _mean(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return (features - batch.target).square().mean()


@_named("sum")
def _sum(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return 0.01 * ((features - batch.target).square().sum() + scores.square().sum())


@_named("tokens")
def _tokens(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


@_named("classes")
def _classes(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(scores.mean(1), batch.tokens[:, 0] % scores.shape[-1])


@_named("smoothed")
def _smoothed(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(scores[:, -1], batch.tokens[:, 0] % scores.shape[-1], label_smoothing=0.1)


@_named("weighted_classes")
def _weighted(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(scores[:, -1], batch.tokens[:, 0] % scores.shape[-1], weight=model.class_weights)


@_named("masked_mean")
def _masked(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    error = (features - batch.target).square().mean(-1)
    return (error * batch.mask).sum() / batch.mask.sum().clamp(min=1)


@_named("by_lengths")
def _by_lengths(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    inside = torch.arange(features.shape[1]) < batch.lengths[:, None]
    return (features - batch.target).square().mean(-1)[inside].mean()


@_named("hardest")
def _hardest(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    """A mean over the samples that are worse than a bound."""
    error = (features - batch.target).square().mean((1, 2))
    hard = (error.detach() > 1.5).to(error.dtype)
    return (error * hard).sum() / hard.sum().clamp(min=1)


@_named("top")
def _top(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return (features - batch.target).square().mean((1, 2)).topk(2 if len(features) > 1 else 1).values.mean()


@_named("contrast")
def _contrast(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    """Samples influence one another."""
    pooled = F.normalize(features.mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.t(), torch.arange(len(pooled)))


@_named("penalty")
def _penalty(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    """With a term that reads weights."""
    return _mean(model, scores, features, batch) + 1e-2 * model.head.weight.square().sum()


def _counted(name: str) -> Any:
    """With counts that are clamped, maxed, or no whole number; what is summed is not 0 where there is nothing."""

    def loss(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
        error = (features - batch.target).square().mean(-1)
        summed = (error * batch.mask).sum() + (0.1 * error.sum() if name != "epsilon" else 0)
        return summed / COUNTS[name](batch)

    return loss


LOSSES |= {name: _counted(name) for name in COUNTS}


@_named("normalised")
def _normalised(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    """A mean of what a share of the batch divides."""
    error = (features - batch.target).square().mean(-1)
    return (error * batch.mask / batch.mask.mean().clamp(min=0.1)).mean()


@_named("sum_and_mean")
def _sum_and_mean(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return _mean(model, scores, features, batch) + 0.01 * scores.square().sum()
