"""Certificates hold for other batches, other weights and other settings than those that were probed, or there are none.

So it is for losses of several terms, of which the first batch shows one, and for operations that mix samples.
``RETIME_RANDOM=5000`` tries that many seeds; one in every run of the tests, the others in long ones.
"""

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.parts.combine import Certificate, NotSeparableError, WeightsUnclearError
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.sub_batches import SubBatches
from support.memory_losses import CLASSES, FEATURES, ORDINARY, STEPS, TRICKY, Learner, Loss, batch_of

COUNT = max(2, int(os.environ.get("RETIME_RANDOM", "0")) // (len(ORDINARY) + len(TRICKY)))
BATCHES = 4


def gradient(model: Learner) -> torch.Tensor:
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


def certificate_of(loss: Loss, seed: int) -> Certificate:
    """What the first batch gives, after it was used for others; weights that were wrong for one fail the test."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Learner()
    sizes = torch.randint(4, 17, (BATCHES + 1,), generator=generator).tolist()
    certificate = first = certify(lambda part: loss(model, part), batch_of(sizes[0], generator), model)
    for samples in sizes[1:]:
        if not certificate.separable:
            break
        model.change(generator)
        batch = batch_of(samples, generator)
        torch.manual_seed(0)
        loss(model, batch).backward()
        whole = gradient(model)
        torch.manual_seed(0)
        size = int(torch.randint(1, samples, (), generator=generator))
        try:
            parts = SubBatches(model, lambda part: loss(model, part), batch, size, certificate)
        except (NotSeparableError, WeightsUnclearError):
            break
        certificate = parts.certificate
        parts.run()
        scale = whole.norm() + sum(p.numel() for p in model.parameters()) * 1e-6
        assert float((gradient(model) - whole).norm() / scale) < 1e-3, (
            f"seed {seed}, {samples} by {size}: {certificate}"
        )
    return first


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, COUNT), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*ORDINARY, *TRICKY])
def test_ordinary_losses_are_split_and_those_that_only_look_separable_not_wrongly(name: str, seeds: range) -> None:
    for seed in seeds:
        assert certificate_of((ORDINARY | TRICKY)[name], seed).separable or name in TRICKY


def certificate_of_terms(loss: Loss) -> Certificate:
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


ALIKE: dict[str, Loss] = {
    "sum by length beside a mean": lambda m, b: m.each(b).sum() / len(b["x"]) + squares(m, b).mean(),
    "shares beside a mean": lambda m, b: (m.each(b) / len(b["x"])).sum() + squares(m, b).mean(),
    "penalty beside a mean over tokens": lambda m, b: tokens(m, b) + m.share * m.head.weight.square().sum(),
    "state that learns nothing, as a metric's": lambda m, b: (m.state + m.each(b).sum()) / len(b["x"]),
    "classes beside a mean": lambda m, b: F.cross_entropy(m(b["x"]), b["y"]) + squares(m, b).mean(),
}


@pytest.mark.parametrize("name", [*ALIKE, *DIFFERENT])
def test_terms_that_add_up_alike_are_split_and_others_keep_a_batch_whole(name: str) -> None:
    assert certificate_of_terms((ALIKE | DIFFERENT)[name]).separable is (name in ALIKE)


SAMPLES, NAMES = 11, 1000


def certificate_by_row(loss: Loss, **further: Tensor) -> Certificate:
    torch.manual_seed(3)
    model = Learner()
    model.names = nn.Embedding(NAMES, FEATURES, scale_grad_by_freq=True)
    batch = {
        "x": torch.randn(SAMPLES, FEATURES),
        "y": torch.randint(CLASSES, (SAMPLES,)),
        "name": torch.randperm(NAMES)[:SAMPLES],
        **further,
    }
    return certify(lambda part: loss(model, part), batch, model)


def attention(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])


def shuffled(h: Tensor) -> Tensor:
    return torch.zeros_like(h).index_copy(0, torch.randperm(len(h)), h)


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "neighbours": lambda h: h[1:] - h[:-1],
    "halves": lambda h: h.chunk(2)[0],
    "every other": lambda h: h[::2],
    "pairs": F.pdist,
    "by position": lambda h: h.sum(1) * torch.arange(len(h)),
    "reversed": lambda h: h * h[list(range(len(h)))[::-1]],
    "shuffled": lambda h: h * shuffled(h),
    "attention": attention,
    "convolution": lambda h: F.conv1d(h.t()[None], torch.ones(1, FEATURES, 3), padding=1),
    "pooling": lambda h: F.avg_pool1d(h.t()[None], 3, 1, 1),
    "Fourier transform": lambda h: torch.fft.fft(h, dim=0).real,
    "LayerNorm over samples": lambda h: F.layer_norm(h.t(), (len(h),)).relu(),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_is_found_although_it_counts_for_nothing_yet(name: str) -> None:
    mixed = MIXED[name]

    certificate = certificate_by_row(lambda m, b: m.each(b).mean() + m.share * mixed(m.two(b["x"])).square().mean())

    assert not certificate.separable


def test_rows_by_their_numbers_are_as_they_were() -> None:
    assert certificate_by_row(
        lambda m, b: -m(b["x"]).log_softmax(1)[torch.arange(len(b["x"])), b["y"]].mean()
    ).separable


def test_sums_of_each_samples_own_rows_are_as_they_were() -> None:
    def loss(m: Learner, b: dict[str, Tensor]) -> Tensor:
        of = torch.repeat_interleave(torch.arange(len(b["x"])), 2)
        own = torch.stack([b["x"], 2 * b["x"]], 1).flatten(0, 1)
        return F.cross_entropy(torch.zeros(len(b["x"]), CLASSES).index_add(0, of, m(own)), b["y"])

    assert certificate_by_row(loss).separable


def _shares(m: Learner, b: dict[str, Tensor]) -> Tensor:
    return (m.each(b) / torch.bincount(b["name"], minlength=NAMES)[b["name"]]).sum()


def _shares_of_unique(m: Learner, b: dict[str, Tensor]) -> Tensor:
    _, which, counts = b["name"].unique(return_inverse=True, return_counts=True)
    return (m.each(b) / counts[which]).sum()


@pytest.mark.parametrize("loss", [_shares, _shares_of_unique, lambda m, b: m.head(m.names(b["name"])).square().mean()])
def test_counts_of_equal_values_are_found_although_all_differ(loss: Loss) -> None:
    certificate = certificate_by_row(loss)

    assert not certificate.separable
