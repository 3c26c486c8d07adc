"""Losses of several terms, of which the first batch shows one: all of them have to add up in the same way."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retime.foundations.parts.combine import Certificate
from retime.mechanisms.memory_budget import certify
from support.memory_losses import STEPS, Learner, batch_of

Loss = Callable[[Learner, dict[str, Tensor]], Tensor]


def certificate_of(loss: Loss) -> Certificate:
    torch.manual_seed(3)
    model = Learner()
    model.register_buffer("state", torch.zeros(()))
    return certify(lambda part: loss(model, part), batch_of(11, torch.Generator().manual_seed(3)), model)


def squares(m: Learner, b: dict[str, Tensor]) -> Tensor:
    return m.share * m.two(b["x"]).square()


def tokens(m: Learner, b: dict[str, Tensor]) -> Tensor:
    scores = m(b["x"][:, None] * torch.arange(STEPS)[:, None])
    return F.cross_entropy(scores.flatten(0, 1), b["labels"].flatten())


DIFFERENT: dict[str, Loss] = {
    "mean beside a mean over tokens": lambda m, b: tokens(m, b) + squares(m, b).mean(),
    "sum beside a sum by length": lambda m, b: m.each(b).sum() / len(b["x"]) + squares(m, b).sum(),
    "sum beside a sum by length in a tensor": lambda m, b: (
        m.each(b).sum() / torch.tensor(len(b["x"])) + squares(m, b).sum()
    ),
    "sum by length beside a sum": lambda m, b: m.each(b).sum() + squares(m, b).sum() / len(b["x"]),
    "sum beside a sum of shares": lambda m, b: (m.each(b) / len(b["x"])).sum() + squares(m, b).sum(),
    "mean times length beside a mean": lambda m, b: m.each(b).mean() * len(b["x"]) + squares(m, b).mean(),
    "mean by length": lambda m, b: m.each(b).mean() + squares(m, b).mean() / len(b["x"]),
    "root of the length": lambda m, b: m.each(b).mean() + squares(m, b).sum() / len(b["x"]) ** 0.5,
    "squares of shares": lambda m, b: m.each(b).mean() + (squares(m, b) / len(b["x"])).square().sum(),
    "penalty beside a sum": lambda m, b: m.each(b).sum() + m.share * m.head.weight.square().sum(),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_terms_that_add_up_in_different_ways_keep_a_batch_whole(name: str) -> None:
    assert not certificate_of(DIFFERENT[name]).separable


ALIKE: dict[str, Loss] = {
    "sum by length beside a mean": lambda m, b: m.each(b).sum() / len(b["x"]) + squares(m, b).mean(),
    "shares beside a mean": lambda m, b: (m.each(b) / len(b["x"])).sum() + squares(m, b).mean(),
    "penalty beside a mean over tokens": lambda m, b: tokens(m, b) + m.share * m.head.weight.square().sum(),
    "state that learns nothing, as a metric's": lambda m, b: (m.state + m.each(b).sum()) / len(b["x"]),
    "classes beside a mean": lambda m, b: F.cross_entropy(m(b["x"]), b["y"]) + squares(m, b).mean(),
}


@pytest.mark.parametrize("name", ALIKE)
def test_terms_that_add_up_alike_are_split(name: str) -> None:
    assert certificate_of(ALIKE[name]).separable
