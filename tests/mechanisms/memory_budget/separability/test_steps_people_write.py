"""Losses of papers and libraries: under a budget each ends with the plain weights, split or whole.

Each loss says whether it should be split: those that add up by samples must be, those that cannot add up must not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.memory_trained import trained

SAMPLES, FEATURES, CLASSES, STEPS = 12, 4, 3, 5
Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.words = nn.Embedding(9, FEATURES)
        self.blank = nn.Linear(FEATURES, 9)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("centre", torch.zeros(FEATURES))
        self.register_buffer("queue", torch.randn(7, FEATURES))
        self.teacher = [nn.Linear(FEATURES, CLASSES).double()]  # no part of the model
        self.epoch, self.seen, self.step_number = 0, 0, 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.one(x)))

    def each(self, b: Batch) -> Tensor:
        return F.cross_entropy(self(b["x"]), b["y"], reduction="none")

    def near(self, x: Tensor) -> Tensor:
        return F.normalize(self.two(x), dim=1)

    def tokens(self, b: Batch) -> Tensor:
        """(B, T, 9)"""
        return self.blank(torch.tanh(self.words(b["ids"])))


Loss = Callable[[Net, Batch], Any]
SPLIT: dict[str, Loss] = {}
WHOLE: dict[str, Loss] = {}
EITHER: dict[str, Loss] = {}


def _in(table: dict[str, Loss]) -> Callable[[Loss], Loss]:
    def add(loss: Loss) -> Loss:
        table[loss.__name__.strip("_").replace("_", " ")] = loss
        return loss

    return add


@_in(SPLIT)
def _focal(m: Net, b: Batch) -> Tensor:
    each = m.each(b)
    return ((1 - (-each).exp()) ** 2 * each).mean()


@_in(SPLIT)
def _label_smoothing(m: Net, b: Batch) -> Tensor:
    return F.cross_entropy(m(b["x"]), b["y"], label_smoothing=0.1)


@_in(SPLIT)
def _kl_batchmean(m: Net, b: Batch) -> Tensor:
    with torch.no_grad():
        wanted = (m.teacher[0](b["x"]) / 2).softmax(1)
    return F.kl_div((m(b["x"]) / 2).log_softmax(1), wanted, reduction="batchmean") * 4


@_in(SPLIT)
def _language_model(m: Net, b: Batch) -> Tensor:
    return F.cross_entropy(m.tokens(b)[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten(), ignore_index=0)


@_in(SPLIT)
def _masked_mean(m: Net, b: Batch) -> Tensor:
    mask = b["mask"].double()
    each = F.cross_entropy(m.tokens(b).transpose(1, 2), b["ids"], reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


@_in(SPLIT)
def _regression_and_class(m: Net, b: Batch) -> dict[str, Tensor]:
    one, two = F.cross_entropy(m(b["x"]), b["y"]), F.smooth_l1_loss(m.two(b["x"]), b["x"])
    return {"loss": one + 0.3 * two, "one": one.detach(), "two": two.detach()}


@_in(SPLIT)
def _dice_of_each(m: Net, b: Batch) -> Tensor:
    guess, truth = m.tokens(b).sigmoid().mean(2), b["mask"].double()
    return (1 - (2 * (guess * truth).sum(1) + 1) / (guess.sum(1) + truth.sum(1) + 1)).mean()


@_in(SPLIT)
def _gradient_penalty_of_inputs(m: Net, b: Batch) -> Tensor:
    x = b["x"].detach().requires_grad_()
    (slope,) = torch.autograd.grad(m(x).logsumexp(1).sum(), x, create_graph=True)
    return m.each(b).mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()


@_in(EITHER)
def _triplets_given(m: Net, b: Batch) -> Tensor:
    return F.triplet_margin_loss(m.two(b["x"]), m.two(b["x"] + 1), m.two(b["x"] - 1))


@_in(SPLIT)
def _epoch_weight(m: Net, b: Batch) -> Tensor:
    return m.each(b).mean() + min(1.0, m.epoch / 2) * F.mse_loss(m.two(b["x"]), b["x"])


@_in(SPLIT)
def _deep_supervision(m: Net, b: Batch) -> Tensor:
    h, total = b["x"], torch.zeros((), dtype=torch.float64)
    for weight in (0.2, 0.3, 0.5):
        h = torch.tanh(m.one(h))
        total = total + weight * F.cross_entropy(m.head(h), b["y"])
    return total


@_in(SPLIT)
def _samples_seen_for_a_log(m: Net, b: Batch) -> Tensor:
    m.seen += len(b["x"])
    return m.each(b).mean()


@_in(EITHER)
def _queue_of_negatives(m: Net, b: Batch) -> Tensor:
    anchor = m.near(b["x"])
    with torch.no_grad():
        key = F.normalize(b["x"], dim=1)
    scores = torch.cat([(anchor * key).sum(1, keepdim=True), anchor @ m.queue.t()], 1) / 0.2
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


@_in(SPLIT)
def _unused_heads(m: Net, b: Batch) -> Tensor:
    return m.each(b).mean() + 0.0 * sum(parameter.sum() for parameter in m.parameters())


@_in(SPLIT)
def _uncertainty_weights(m: Net, b: Batch) -> Tensor:
    one, two = m.each(b).mean(), F.mse_loss(m.two(b["x"]), b["x"])
    scale = m.head.bias
    return (-scale[0]).exp() * one + (-scale[1]).exp() * two + scale[0] + scale[1]


@_in(WHOLE)
def _info_nce(m: Net, b: Batch) -> Tensor:
    one, two = m.near(b["x"]), m.near(b["x"] + 0.1)
    return F.cross_entropy(one @ two.t() / 0.2, torch.arange(len(one)))


@_in(WHOLE)
def _nt_xent(m: Net, b: Batch) -> Tensor:
    both = torch.cat([m.near(b["x"]), m.near(b["x"] + 0.1)])
    scores = (both @ both.t() / 0.2).masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
    half = len(b["x"])
    return F.cross_entropy(scores, (torch.arange(2 * half) + half) % (2 * half))


@_in(WHOLE)
def _sup_con(m: Net, b: Batch) -> Tensor:
    near = m.near(b["x"])
    same = (b["y"][:, None] == b["y"]).double() - torch.eye(len(near), dtype=torch.float64)
    rows = (near @ near.t() / 0.5).log_softmax(1)
    return -((same * rows).sum(1) / same.sum(1).clamp(min=1)).mean()


@_in(WHOLE)
def _batch_hard(m: Net, b: Batch) -> Tensor:
    apart = torch.cdist(m.two(b["x"]), m.two(b["x"]) + 1e-3)
    same = b["y"][:, None] == b["y"]
    far, near = (apart * same).amax(1), apart.masked_fill(same, 1e9).amin(1)
    return (far - near + 0.3).relu().mean()


@_in(WHOLE)
def _vicreg(m: Net, b: Batch) -> Tensor:
    z = m.two(b["x"])
    z = z - z.mean(0)
    cov = z.t() @ z / (len(z) - 1)
    return (1 - z.var(0).sqrt()).relu().mean() + (cov - torch.diag(cov.diagonal())).square().sum() / FEATURES


@_in(WHOLE)
def _barlow(m: Net, b: Batch) -> Tensor:
    one, two = m.two(b["x"]), m.two(b["x"] + 0.1)
    one, two = ((z - z.mean(0)) / z.std(0) for z in (one, two))
    return (one.t() @ two / len(one) - torch.eye(FEATURES, dtype=torch.float64)).square().sum()


@_in(WHOLE)
def _mixup(m: Net, b: Batch) -> Tensor:
    order = torch.randperm(len(b["x"]))
    scores = m(0.7 * b["x"] + 0.3 * b["x"][order])
    return 0.7 * F.cross_entropy(scores, b["y"]) + 0.3 * F.cross_entropy(scores, b["y"][order])


@_in(WHOLE)
def _mixup_later(m: Net, b: Batch) -> Tensor:
    share = min(0.5, 0.25 * m.epoch)
    x = (1 - share) * b["x"] + share * b["x"].flip(0)
    return F.cross_entropy(m(x), b["y"])


@_in(WHOLE)
def _dice_of_the_batch(m: Net, b: Batch) -> Tensor:
    guess, truth = m.tokens(b).sigmoid().mean(2).flatten(), b["mask"].double().flatten()
    return 1 - (2 * (guess * truth).sum() + 1) / (guess.sum() + truth.sum() + 1)


@_in(WHOLE)
def _per_class_balanced(m: Net, b: Batch) -> Tensor:
    counts = torch.bincount(b["y"], minlength=CLASSES).clamp(min=1)
    return (m.each(b) / counts[b["y"]]).sum() / CLASSES


@_in(WHOLE)
def _weights_of_inverse_frequency(m: Net, b: Batch) -> Tensor:
    counts = torch.stack([(b["y"] == one).sum() for one in range(CLASSES)]).clamp(min=1)
    return F.cross_entropy(m(b["x"]), b["y"], weight=len(b["y"]) / counts.double())


@_in(WHOLE)
def _running_mean_of_the_loss(m: Net, b: Batch) -> Tensor:
    loss = m.each(b).mean()
    with torch.no_grad():
        m.average.mul_(0.9).add_(0.1 * loss)
    return loss / (1 + m.average)


@_in(WHOLE)
def _centre_of_a_teacher(m: Net, b: Batch) -> Tensor:
    with torch.no_grad():
        wanted = (b["x"] - m.centre).softmax(1)
        m.centre.mul_(0.9).add_(0.1 * b["x"].mean(0))
    return -(wanted * m.two(b["x"]).log_softmax(1)).sum(1).mean()


@_in(WHOLE)
def _warm_up_by_own_count(m: Net, b: Batch) -> Tensor:
    m.step_number += 1
    return m.each(b).mean() * min(1.0, m.step_number / 3)


@_in(WHOLE)
def _hardest_fifth(m: Net, b: Batch) -> Tensor:
    return m.each(b).topk(max(1, len(b["x"]) // 5)).values.mean()


@_in(WHOLE)
def _koleo(m: Net, b: Batch) -> Tensor:
    near = m.near(b["x"])
    apart = (near @ near.t()).fill_diagonal_(-1)
    return m.each(b).mean() - 0.1 * (near - near[apart.argmax(1)]).norm(dim=1).log().mean()


@_in(WHOLE)
def _load_balance(m: Net, b: Batch) -> Tensor:
    routes = m(b["x"]).softmax(1)
    share = F.one_hot(routes.argmax(1), CLASSES).double().mean(0)
    return F.mse_loss(m.two(b["x"]), b["x"]) + 0.1 * CLASSES * (share * routes.mean(0)).sum()


@_in(WHOLE)
def _advantages_over_the_batch(m: Net, b: Batch) -> Tensor:
    gain = b["x"][:, 0]
    return (m.each(b) * (gain - gain.mean()) / (gain.std() + 1e-8)).mean()


@_in(WHOLE)
def _rank_of_samples(m: Net, b: Batch) -> Tensor:
    score, gain = m(b["x"])[:, 0], b["x"][:, 0]
    return F.softplus(-(score[:, None] - score) * (gain[:, None] - gain).sign()).mean()


@_in(EITHER)
def _positives(m: Net, b: Batch) -> Tensor:
    positive = b["y"] > 0
    positives = F.smooth_l1_loss(m.two(b["x"])[positive], b["x"][positive], reduction="sum")
    return (m.each(b).sum() + positives) / max(1, int(positive.sum()))


@_in(EITHER)
def _positives_in_a_tensor(m: Net, b: Batch) -> Tensor:
    positive = (b["y"] > 0).double()
    return (m.each(b) * positive).sum() / positive.sum().clamp(min=1)


@_in(EITHER)
def _at_least_positives(m: Net, b: Batch) -> Tensor:
    positive = (b["y"] > 0).double()
    return (m.each(b) * positive).sum() / positive.sum().clamp(min=8)


@_in(EITHER)
def _ctc(m: Net, b: Batch) -> Tensor:
    scores = m.tokens(b).log_softmax(2).transpose(0, 1)
    lengths = torch.full((len(b["x"]),), STEPS)
    return F.ctc_loss(scores, b["y"][:, None] + 1, lengths, torch.ones_like(lengths))


@_in(EITHER)
def _packed(m: Net, b: Batch) -> Tensor:
    rows = b["mask"].bool()
    return F.cross_entropy(m.tokens(b)[rows], b["ids"][rows])


@_in(EITHER)
def _weights_of_samples(m: Net, b: Batch) -> Tensor:
    return (m.each(b) * b["gain"]).sum() / b["gain"].sum()


@_in(EITHER)
def _two_views_side_by_side(m: Net, b: Batch) -> Tensor:
    one, two = m.near(torch.cat([b["x"], b["x"] + 0.1])).chunk(2)
    return -(one * two).sum(1).mean()


@_in(EITHER)
def _shifted_labels(m: Net, b: Batch) -> Tensor:
    return F.cross_entropy(m(b["x"]), (b["y"] + 1) % CLASSES)


@_in(EITHER)
def _own_mean(m: Net, b: Batch) -> Tensor:
    each = m.each(b)
    return sum(each[at] for at in range(len(each))) / len(each)


@_in(EITHER)
def _tokens_by_a_read_count(m: Net, b: Batch) -> Tensor:
    each = F.cross_entropy(m.tokens(b).transpose(1, 2), b["ids"], reduction="none", ignore_index=0)
    return each.sum() / (b["ids"] != 0).sum().item()


@_in(EITHER)
def _accumulated_over_a_fixed_count(m: Net, b: Batch) -> Tensor:
    return m.each(b).sum() / SAMPLES


@_in(EITHER)
def _long_batches_by_chunks(m: Net, b: Batch) -> Tensor:
    return torch.cat([m.each({"x": x, "y": y}) for x, y in zip(b["x"].split(4), b["y"].split(4), strict=True)]).mean()


@_in(EITHER)
def _mean_of_chunk_means(m: Net, b: Batch) -> Tensor:
    chunks = zip(b["x"].split(5), b["y"].split(5), strict=True)
    return torch.stack([m.each({"x": x, "y": y}).mean() for x, y in chunks]).mean()


@_in(EITHER)
def _consistency_later(m: Net, b: Batch) -> Tensor:
    guess = m(b["x"]).softmax(1)
    return m.each(b).mean() + 0.5 * m.epoch * (guess - guess.mean(0)).square().sum(1).mean()


def batches() -> list[Batch]:
    torch.manual_seed(1)
    drawn = []
    for _ in range(4):
        ids = torch.randint(1, 9, (SAMPLES, STEPS))
        mask = (torch.arange(STEPS) < torch.randint(1, STEPS + 1, (SAMPLES, 1))).long()
        drawn.append(
            {
                "x": torch.randn(SAMPLES, FEATURES, dtype=torch.float64),
                "y": torch.randint(CLASSES, (SAMPLES,)),
                "ids": ids * mask,
                "mask": mask,
                "gain": torch.rand(SAMPLES, dtype=torch.float64),
            }
        )
    return drawn


def _next_epoch(model: Any, step: int) -> None:
    model.epoch = step


@pytest.mark.parametrize("name", [*SPLIT, *WHOLE, *EITHER])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_are_the_plain_ones(name: str) -> None:
    loss = (SPLIT | WHOLE | EITHER)[name]
    torch.manual_seed(0)
    model = Net()

    def step_of(net: Any) -> Callable[[Batch], Any]:
        return lambda batch: loss(net, batch)

    plain, budgeted = (trained(step_of, model, batches(), budget, _next_epoch) for budget in (False, True))

    assert budgeted.differs_from(plain) < 1e-7, f"split: {budgeted.split}; {budgeted.reason}"
    if name not in EITHER:
        assert budgeted.split == (name in SPLIT), budgeted.reason
