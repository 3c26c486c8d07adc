"""Losses on which certificates are tried: ordinary ones, which must be split, and those that only look separable."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CLASSES, STEPS = 8, 3, 4
Loss = Callable[["Learner", dict[str, Tensor]], Tensor]


class Learner(nn.Module):
    """Two ways through, and what a training run may change from batch to batch."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(features, features), nn.Linear(features, features)
        self.head = nn.Linear(features, CLASSES)
        self.register_buffer("class_weights", torch.ones(CLASSES))
        self.plain_weights = torch.ones(CLASSES)
        self.share, self.least = 0.0, 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.one(x)))

    def each(self, batch: dict[str, Tensor]) -> Tensor:
        """A loss a sample."""
        return F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")

    def change(self, generator: torch.Generator) -> None:
        """As callbacks and optimizers do while training goes on."""
        self.class_weights.copy_(torch.rand(CLASSES, generator=generator) + 0.1)
        self.plain_weights = torch.rand(CLASSES, generator=generator) + 0.1
        self.share = float(torch.rand((), generator=generator)) + 0.5
        self.least = float(torch.rand((), generator=generator)) * 2
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator)


def batch_of(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Class numbers, a mask of samples, class numbers of steps with holes, weights."""
    where = 2 * torch.randn((), generator=generator)
    labels = torch.randint(CLASSES, (samples, STEPS), generator=generator)
    return {
        "x": where + torch.randn(samples, FEATURES, generator=generator),
        "y": torch.randint(CLASSES, (samples,), generator=generator),
        "keep": torch.rand(samples, generator=generator) < 0.7,
        "labels": labels.masked_fill(torch.rand(samples, STEPS, generator=generator) < 0.3, -100),
        "pairs": torch.randint(CLASSES, (samples, 2), generator=generator),
        "weights": torch.rand(samples, generator=generator),
    }


ORDINARY: dict[str, Loss] = {
    "mean": lambda m, b: m.each(b).mean(),
    "cross entropy": lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
    "sum": lambda m, b: m.each(b).sum(),
    "sum by length": lambda m, b: m.each(b).sum() / len(b["x"]),
    "smoothed": lambda m, b: F.cross_entropy(m(b["x"]), b["y"], label_smoothing=0.1),
    "one ignored": lambda m, b: F.cross_entropy(m(b["x"]), b["y"], ignore_index=1),
    "soft targets": lambda m, b: F.cross_entropy(m(b["x"]), F.one_hot(b["y"], CLASSES).float()),
    "squares": lambda m, b: F.mse_loss(m.two(b["x"]), b["x"]),
    "binary": lambda m, b: F.binary_cross_entropy_with_logits(
        m(b["x"]), F.one_hot(b["y"], CLASSES).float(), pos_weight=m.class_weights
    ),
    "masked": lambda m, b: (m.each(b) * b["keep"]).sum() / b["keep"].sum().clamp(min=1),
    "chosen by mask": lambda m, b: m.each(b)[b["keep"]].mean(),
    "weighed samples": lambda m, b: (m.each(b) * b["weights"]).sum() / b["weights"].sum(),
    "penalty": lambda m, b: m.each(b).mean() + 0.1 * m.head.weight.square().sum(),
    "focal": lambda m, b: (m.each(b) * (1 - (-m.each(b).detach()).exp())).mean(),
    "small ones left out": lambda m, b: torch.where(m.each(b) > 1.0, m.each(b), 0.0).mean(),
    "first column": lambda m, b: F.cross_entropy(m(b["x"]), b["pairs"][:, 0]),
    "numbers from text": lambda m, b: F.cross_entropy(m(b["x"]), b["pairs"][:, 1].float().long()),
}


def _ordinary(loss: Loss) -> Loss:
    ORDINARY[loss.__name__.strip("_").replace("_", " ")] = loss
    return loss


@_ordinary
def _tokens(m: Learner, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(m(b["x"][:, None] * torch.arange(STEPS)[:, None]).flatten(0, 1), b["labels"].flatten())


@_ordinary
def _means_of_tokens(m: Learner, b: dict[str, Tensor]) -> Tensor:
    there = b["labels"] != -100
    each = (m(b["x"][:, None] * torch.arange(STEPS)[:, None]).square().sum(2) * there).sum(1)
    return (each / there.sum(1).clamp(min=1)).mean()


@_ordinary
def _logged(m: Learner, b: dict[str, Tensor]) -> Tensor:
    loss = m.each(b).mean()
    assert loss.item() < 1e6
    if not torch.isfinite(loss):
        raise ValueError("the loss has no value")
    seen: dict[str, Any] = {
        "loss": float(loss.detach()),
        "right": (m(b["x"]).argmax(1) == b["y"]).float().mean().item(),
    }
    seen |= {"largest": m.each(b).detach().numpy().max(), "names": [str(int(name)) for name in b["y"]]}
    return loss


TRICKY: dict[str, Loss] = {
    "chosen by value": lambda m, b: m.each(b)[m.each(b) > m.least].mean(),
    "classes with weights": lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=m.class_weights),
    "classes with plain weights": lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=m.plain_weights),
    "hardest": lambda m, b: m.each(b).topk(max(1, len(b["x"]) // 5)).values.mean(),
    "worst": lambda m, b: m.each(b).max(),
    "flooded": lambda m, b: (m.each(b).mean() - m.least).abs() + m.least,
    "clipped": lambda m, b: m.each(b).mean().clamp(max=m.least),
    "larger of two": lambda m, b: torch.maximum(m.each(b).mean(), m.two(b["x"]).square().mean()),
    "above the mean": lambda m, b: m.each(b).mean() + (m.each(b) - m.each(b).mean().detach() - 9).relu().mean(),
    "mixed": lambda m, b: m.each({**b, "x": b["x"] + m.share * b["x"][torch.randperm(len(b["x"]))]}).mean(),
    "sum beside a mean": lambda m, b: m.each(b).mean() + m.share * m.two(b["x"]).square().sum(),
    "far pairs": lambda m, b: m.each(b).mean() + (2 - torch.cdist(m.two(b["x"]), m.two(b["x"]))).relu().mean(),
    "spread": lambda m, b: m.each(b).mean() + m.share * m.two(b["x"]).std(0).mean(),
    "label decides": lambda m, b: m.each(b).mean() * (2 if (b["y"] == 0).any() else 1),
    "divided by a read": lambda m, b: m.each(b).sum() / max(1, (b["y"] != 0).sum().item()),
    "column with holes": lambda m, b: F.cross_entropy(m(b["x"]), b["labels"][:, 0]),
    "labels gate": lambda m, b: m.each(b).mean() + (b["y"] == 0).all() * m.two(b["x"]).square().mean(),
    "labels divide": lambda m, b: m.each(b).mean() / (b["labels"] > 1).all(1).sum().clamp(min=1),
    "by place": lambda m, b: torch.where(torch.arange(len(b["x"])) < 8, m.each(b), 0.0).mean(),
    "branch before a check": lambda m, b: (
        (2.0 if (b["weights"] > 0.95).any() else 1.0) * (m(b["x"]) - F.one_hot(b["y"], CLASSES)).square().mean()
    ),
    "rows found": lambda m, b: m.each(b)[(m.each(b).detach() > m.least).nonzero()[:, 0]].mean(),
}


def _tricky(loss: Loss) -> Loss:
    TRICKY[loss.__name__.strip("_").replace("_", " ")] = loss
    return loss


@_tricky
def _mean_over_chosen(m: Learner, b: dict[str, Tensor]) -> Tensor:
    each = m.each(b)
    chosen = (each > m.least).float()
    return (each * chosen).sum() / chosen.sum().clamp(min=1)


@_tricky
def _mean_over_few(m: Learner, b: dict[str, Tensor]) -> Tensor:
    chosen = (b["x"][:, 0] > 1.5).float()
    return (m.each(b) * chosen).sum() / chosen.sum().clamp(min=1)


@_tricky
def _mean_of_counted(m: Learner, b: dict[str, Tensor]) -> Tensor:
    chosen = m.each(b)[m.each(b) > m.least]
    return chosen.sum() / max(1, len(chosen))


@_tricky
def _sure_ones_teach(m: Learner, b: dict[str, Tensor]) -> Tensor:
    sure, guess = m.two(b["x"])[:, :CLASSES].detach().softmax(1).max(1)
    return F.cross_entropy(m(b["x"]), torch.where(sure > m.least / 2, guess, -100))


@_tricky
def _branch(m: Learner, b: dict[str, Tensor]) -> Tensor:
    hidden = m.one(b["x"]) if b["x"].mean() > 0 else m.two(b["x"])
    return F.cross_entropy(m.head(hidden), b["y"])


@_tricky
def _branch_after_forward(m: Learner, b: dict[str, Tensor]) -> Tensor:
    loss = m.each(b).mean()
    return loss if loss.item() > m.least else 0.5 * loss


@_tricky
def _contrast(m: Learner, b: dict[str, Tensor]) -> Tensor:
    near = F.normalize(m.two(b["x"]), dim=1)
    return m.each(b).mean() + m.share * F.cross_entropy(near @ near.T, torch.arange(len(near)))
