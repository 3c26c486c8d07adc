"""Steps that give the gradient of their parts only for the values that were probed: the operations show it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.parts.combine import Certificate
from retime.mechanisms.memory_budget.separability.certify import certify
from support.memory_losses import CLASSES, FEATURES, Learner

SAMPLES, NAMES = 11, 1000
Loss = Callable[[Learner, dict[str, Tensor]], Tensor]


def certificate_of(loss: Loss, **further: Tensor) -> Certificate:
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

    certificate = certificate_of(lambda m, b: m.each(b).mean() + m.share * mixed(m.two(b["x"])).square().mean())

    assert not certificate.separable


def test_rows_by_their_numbers_are_as_they_were() -> None:
    assert certificate_of(lambda m, b: -m(b["x"]).log_softmax(1)[torch.arange(len(b["x"])), b["y"]].mean()).separable


def test_sums_of_each_samples_own_rows_are_as_they_were() -> None:
    def loss(m: Learner, b: dict[str, Tensor]) -> Tensor:
        of = torch.repeat_interleave(torch.arange(len(b["x"])), 2)
        own = torch.stack([b["x"], 2 * b["x"]], 1).flatten(0, 1)
        return F.cross_entropy(torch.zeros(len(b["x"]), CLASSES).index_add(0, of, m(own)), b["y"])

    assert certificate_of(loss).separable


def _shares(m: Learner, b: dict[str, Tensor]) -> Tensor:
    return (m.each(b) / torch.bincount(b["name"], minlength=NAMES)[b["name"]]).sum()


def _shares_of_unique(m: Learner, b: dict[str, Tensor]) -> Tensor:
    _, which, counts = b["name"].unique(return_inverse=True, return_counts=True)
    return (m.each(b) / counts[which]).sum()


@pytest.mark.parametrize("loss", [_shares, _shares_of_unique, lambda m, b: m.head(m.names(b["name"])).square().mean()])
def test_counts_of_equal_values_are_found_although_all_differ(loss: Loss) -> None:
    certificate = certificate_of(loss)

    assert not certificate.separable
