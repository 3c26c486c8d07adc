"""Small models, batches and losses for the tests of sub-batches: each row trains in one way that matters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[Any], Any]
SAMPLES, CLASSES, WORDS, LENGTH = 11, 5, 20, 9


@dataclass
class Case:
    """A model, its step on a batch, and a batch."""

    model: nn.Module
    step: Step
    batch: Any


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 3, 8, 8), torch.randint(0, CLASSES, (SAMPLES,))


def tokens(ragged: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    labels = ids.clone()
    if ragged:
        for row, length in enumerate(torch.randint(2, LENGTH, (SAMPLES,)).tolist()):
            labels[row, length:] = -100
    return {"ids": ids, "labels": labels}


def convolutional(norm: Callable[[int], nn.Module] = lambda _: nn.Identity(), *extra: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), *extra, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


def classifier(model: nn.Module, reduction: str = "mean") -> Case:
    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    return Case(model, step, images())


def penalised() -> Case:
    case = classifier(convolutional())
    plain = case.step
    penalty = lambda: sum(p.square().sum() for p in case.model.parameters())  # noqa: E731
    return Case(case.model, lambda batch: plain(batch) + 0.1 * penalty(), case.batch)


class LanguageModel(nn.Module):
    """Tied weights, one recurrent or attention layer with dropout."""

    def __init__(self, core: str = "tanh") -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.core = {
            "tanh": lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
            "lstm": lambda: nn.LSTM(16, 16, num_layers=2, dropout=0.3, batch_first=True),
            "time-major gru": lambda: nn.GRU(16, 16, num_layers=2, dropout=0.3),
            "attention": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True),
        }[core]()
        self.kind = core
        self.out = nn.Linear(16, WORDS, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        if self.kind == "time-major gru":
            hidden = self.core(hidden.transpose(0, 1))[0].transpose(0, 1)
        elif self.kind == "lstm":
            hidden = self.core(hidden)[0]
        else:
            hidden = self.core(hidden)
        return self.out(F.dropout(hidden, 0.1, self.training))


def language(core: str = "tanh", ragged: bool = True, shifted: bool = False) -> Case:
    model = LanguageModel(core)

    def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits, labels = model(batch["ids"]), batch["labels"]
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits.detach()}

    return Case(model, step, tokens(ragged))


def masked_mean() -> Case:
    """A mean over what a mask of the batch keeps."""
    model = LanguageModel()
    batch = tokens()
    batch["mask"] = batch.pop("labels") != -100
    batch["weights"] = torch.rand(SAMPLES)

    def step(batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    return Case(model, step, batch)


def weighted_samples() -> Case:
    case = masked_mean()

    def step(batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(case.model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none").mean(1)
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    return Case(case.model, step, case.batch)


def padded_words() -> Case:
    """A mean over the words that are not padding, which the step knows by a number."""
    model = LanguageModel()
    batch = tokens()
    ids = batch["ids"].masked_fill(batch["labels"] == -100, 0)

    def step(ids: Tensor) -> Tensor:
        losses = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
        return losses[ids != 0].mean()

    return Case(model, step, ids)


def contrastive() -> Case:
    model = nn.Linear(16, 8)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        one, two = (F.normalize(model(view), dim=1) for view in batch)
        return F.cross_entropy(one @ two.T * 5, torch.arange(len(one)))

    return Case(model, step, (torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 16)))


def random_depth() -> Case:
    """Noise, dropped samples and dropout, drawn in the step."""
    model = convolutional(lambda channels: nn.GroupNorm(2, channels), nn.Dropout2d(0.3))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0])
        keep = torch.rand(len(x), 1, 1, 1) < 0.7
        return F.cross_entropy(model(x * keep), batch[1])

    return Case(model, step, images())


def checkpointed(reentrant: bool) -> Case:
    model = convolutional(lambda channels: nn.GroupNorm(2, channels), nn.Dropout(0.3))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model[0](batch[0] + torch.randn_like(batch[0]))
        return F.cross_entropy(checkpoint(model[1:], hidden, use_reentrant=reentrant), batch[1])

    return Case(model, step, images())


def frozen_norm() -> Case:
    case = classifier(convolutional(nn.BatchNorm2d))
    case.model[1].eval()
    return case


SEPARABLE: dict[str, tuple[Callable[[], Case], str]] = {
    "no norm": (lambda: classifier(convolutional()), "mean over count(batch[1] != -100)"),
    "GroupNorm": (lambda: classifier(convolutional(lambda c: nn.GroupNorm(2, c))), "mean over count(batch[1] != -100)"),
    "LayerNorm": (
        lambda: classifier(convolutional(lambda c: nn.LayerNorm((c, 6, 6)))),
        "mean over count(batch[1] != -100)",
    ),
    "frozen BatchNorm": (frozen_norm, "mean over count(batch[1] != -100)"),
    "sum": (lambda: classifier(convolutional(), "sum"), "sum over samples"),
    "L2 penalty": (penalised, "mean over count(batch[1] != -100)"),
    "tokens": (language, "mean over count(batch['labels'] != -100)"),
    "tokens, shifted": (lambda: language(shifted=True), "mean over count(batch['labels'][:, 1:] != -100)"),
    "LSTM": (lambda: language("lstm"), "mean over count(batch['labels'] != -100)"),
    "time-major GRU": (lambda: language("time-major gru"), "mean over count(batch['labels'] != -100)"),
    "attention": (lambda: language("attention"), "mean over count(batch['labels'] != -100)"),
    "whole tokens": (lambda: language(ragged=False), "mean over count(batch['labels'] != -100)"),
    "mask": (masked_mean, "mean over count(batch['mask'] == 1)"),
    "weighted samples": (weighted_samples, "mean over sum(batch['weights'])"),
    "padding by number": (padded_words, "mean over count(batch != 0)"),
    "noise": (random_depth, "mean over count(batch[1] != -100)"),
    "checkpoints": (lambda: checkpointed(False), "mean over count(batch[1] != -100)"),
    "reentrant checkpoints": (lambda: checkpointed(True), "mean over count(batch[1] != -100)"),
}
"""By name: how to make it, and what certify must find."""
DETERMINISTIC = [name for name in SEPARABLE if name not in ("LSTM", "time-major GRU", "attention", "noise")]
