"""What a random model is trained for."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contract.random_models.layers import Batch

Loss = Callable[[Any, Tensor, Tensor, Batch], Tensor]
"""Of the model, its scores, its features and the batch."""
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


def _mean(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    return (features - batch.target).square().mean()


def _class_of(scores: Tensor, batch: Batch) -> Tensor:
    return batch.tokens[:, 0] % scores.shape[-1]


def _by_token(features: Tensor, batch: Batch) -> Tensor:
    return (features - batch.target).square().mean(-1)


def _by_sample(features: Tensor, batch: Batch) -> Tensor:
    return (features - batch.target).square().mean((1, 2))


def _by_lengths(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    inside = torch.arange(features.shape[1]) < batch.lengths[:, None]
    return _by_token(features, batch)[inside].mean()


def _hardest(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    """A mean over the samples that are worse than a bound."""
    error = _by_sample(features, batch)
    hard = (error.detach() > 1.5).to(error.dtype)
    return (error * hard).sum() / hard.sum().clamp(min=1)


def _contrast(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
    """Samples influence one another."""
    pooled = F.normalize(features.mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.t(), torch.arange(len(pooled)))


def _counted(name: str) -> Loss:
    """With counts that are clamped, maxed, or no whole number; what is summed is not 0 where there is nothing."""

    def loss(model: Any, scores: Tensor, features: Tensor, batch: Batch) -> Tensor:
        error = _by_token(features, batch)
        summed = (error * batch.mask).sum() + (0.1 * error.sum() if name != "epsilon" else 0)
        return summed / COUNTS[name](batch)

    return loss


LOSSES: dict[str, Loss] = {
    "mean": _mean,
    "sum": lambda m, scores, features, b: 0.01 * ((features - b.target).square().sum() + scores.square().sum()),
    "tokens": lambda m, scores, f, b: F.cross_entropy(scores.flatten(0, 1), b.labels.flatten(), ignore_index=-100),
    "classes": lambda m, scores, f, b: F.cross_entropy(scores.mean(1), _class_of(scores, b)),
    "smoothed": lambda m, scores, f, b: F.cross_entropy(scores[:, -1], _class_of(scores, b), label_smoothing=0.1),
    "weighted_classes": lambda m, scores, f, b: F.cross_entropy(
        scores[:, -1], _class_of(scores, b), weight=m.class_weights
    ),
    "masked_mean": lambda m, s, features, b: (_by_token(features, b) * b.mask).sum() / b.mask.sum().clamp(min=1),
    "by_lengths": _by_lengths,
    "hardest": _hardest,
    "top": lambda m, s, features, b: _by_sample(features, b).topk(2 if len(features) > 1 else 1).values.mean(),
    "contrast": _contrast,
    # with a term that reads weights
    "penalty": lambda m, scores, features, b: _mean(m, scores, features, b) + 1e-2 * m.head.weight.square().sum(),
    **{name: _counted(name) for name in COUNTS},
    # a mean of what a share of the batch divides
    "normalised": lambda m, s, features, b: (_by_token(features, b) * b.mask / b.mask.mean().clamp(min=0.1)).mean(),
    "sum_and_mean": lambda m, scores, features, b: _mean(m, scores, features, b) + 0.01 * scores.square().sum(),
}
