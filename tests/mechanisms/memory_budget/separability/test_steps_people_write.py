"""Losses of papers and libraries: under a budget each ends with the plain weights, split or whole.

Each loss's class says whether it should be split: those that add up by samples must be, those that cannot add up must
not.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.memory_losses import Learner
from support.memory_trained import trained

SAMPLES, FEATURES, CLASSES, STEPS = 12, 4, 3, 5
Batch = dict[str, Tensor]


class Net(Learner):
    def __init__(self) -> None:
        super().__init__(FEATURES)
        self.words = nn.Embedding(9, FEATURES)
        self.blank = nn.Linear(FEATURES, 9)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("centre", torch.zeros(FEATURES))
        self.register_buffer("queue", torch.randn(7, FEATURES))
        self.teacher = [nn.Linear(FEATURES, CLASSES).double()]  # no part of the model
        self.epoch, self.seen, self.step_number = 0, 0, 0
        self.double()

    def near(self, x: Tensor) -> Tensor:
        return F.normalize(self.two(x), dim=1)

    def tokens(self, b: Batch) -> Tensor:
        """(B, T, 9)"""
        return self.blank(torch.tanh(self.words(b["ids"])))


class Split(Net):
    """Losses that add up by samples."""

    def focal(self, b: Batch) -> Tensor:
        each = self.each(b)
        return ((1 - (-each).exp()) ** 2 * each).mean()

    def label_smoothing(self, b: Batch) -> Tensor:
        return F.cross_entropy(self(b["x"]), b["y"], label_smoothing=0.1)

    def kl_batchmean(self, b: Batch) -> Tensor:
        with torch.no_grad():
            wanted = (self.teacher[0](b["x"]) / 2).softmax(1)
        return F.kl_div((self(b["x"]) / 2).log_softmax(1), wanted, reduction="batchmean") * 4

    def language_model(self, b: Batch) -> Tensor:
        return F.cross_entropy(self.tokens(b)[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten(), ignore_index=0)

    def masked_mean(self, b: Batch) -> Tensor:
        mask = b["mask"].double()
        each = F.cross_entropy(self.tokens(b).transpose(1, 2), b["ids"], reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1)

    def regression_and_class(self, b: Batch) -> dict[str, Tensor]:
        one, two = F.cross_entropy(self(b["x"]), b["y"]), F.smooth_l1_loss(self.two(b["x"]), b["x"])
        return {"loss": one + 0.3 * two, "one": one.detach(), "two": two.detach()}

    def dice_of_each(self, b: Batch) -> Tensor:
        guess, truth = self.tokens(b).sigmoid().mean(2), b["mask"].double()
        return (1 - (2 * (guess * truth).sum(1) + 1) / (guess.sum(1) + truth.sum(1) + 1)).mean()

    def gradient_penalty_of_inputs(self, b: Batch) -> Tensor:
        x = b["x"].detach().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).logsumexp(1).sum(), x, create_graph=True)
        return self.each(b).mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    def epoch_weight(self, b: Batch) -> Tensor:
        return self.each(b).mean() + min(1.0, self.epoch / 2) * F.mse_loss(self.two(b["x"]), b["x"])

    def deep_supervision(self, b: Batch) -> Tensor:
        h, total = b["x"], torch.zeros((), dtype=torch.float64)
        for weight in (0.2, 0.3, 0.5):
            h = torch.tanh(self.one(h))
            total = total + weight * F.cross_entropy(self.head(h), b["y"])
        return total

    def samples_seen_for_a_log(self, b: Batch) -> Tensor:
        self.seen += len(b["x"])
        return self.each(b).mean()

    def unused_heads(self, b: Batch) -> Tensor:
        return self.each(b).mean() + 0.0 * sum(parameter.sum() for parameter in self.parameters())

    def uncertainty_weights(self, b: Batch) -> Tensor:
        one, two = self.each(b).mean(), F.mse_loss(self.two(b["x"]), b["x"])
        scale = self.head.bias
        return (-scale[0]).exp() * one + (-scale[1]).exp() * two + scale[0] + scale[1]


class Whole(Net):
    """Losses that cannot add up."""

    def info_nce(self, b: Batch) -> Tensor:
        one, two = self.near(b["x"]), self.near(b["x"] + 0.1)
        return F.cross_entropy(one @ two.t() / 0.2, torch.arange(len(one)))

    def nt_xent(self, b: Batch) -> Tensor:
        both = torch.cat([self.near(b["x"]), self.near(b["x"] + 0.1)])
        scores = (both @ both.t() / 0.2).masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
        half = len(b["x"])
        return F.cross_entropy(scores, (torch.arange(2 * half) + half) % (2 * half))

    def sup_con(self, b: Batch) -> Tensor:
        near = self.near(b["x"])
        same = (b["y"][:, None] == b["y"]).double() - torch.eye(len(near), dtype=torch.float64)
        rows = (near @ near.t() / 0.5).log_softmax(1)
        return -((same * rows).sum(1) / same.sum(1).clamp(min=1)).mean()

    def batch_hard(self, b: Batch) -> Tensor:
        apart = torch.cdist(self.two(b["x"]), self.two(b["x"]) + 1e-3)
        same = b["y"][:, None] == b["y"]
        far, near = (apart * same).amax(1), apart.masked_fill(same, 1e9).amin(1)
        return (far - near + 0.3).relu().mean()

    def vicreg(self, b: Batch) -> Tensor:
        z = self.two(b["x"])
        z = z - z.mean(0)
        cov = z.t() @ z / (len(z) - 1)
        return (1 - z.var(0).sqrt()).relu().mean() + (cov - torch.diag(cov.diagonal())).square().sum() / FEATURES

    def barlow(self, b: Batch) -> Tensor:
        one, two = self.two(b["x"]), self.two(b["x"] + 0.1)
        one, two = ((z - z.mean(0)) / z.std(0) for z in (one, two))
        return (one.t() @ two / len(one) - torch.eye(FEATURES, dtype=torch.float64)).square().sum()

    def mixup(self, b: Batch) -> Tensor:
        order = torch.randperm(len(b["x"]))
        scores = self(0.7 * b["x"] + 0.3 * b["x"][order])
        return 0.7 * F.cross_entropy(scores, b["y"]) + 0.3 * F.cross_entropy(scores, b["y"][order])

    def mixup_later(self, b: Batch) -> Tensor:
        share = min(0.5, 0.25 * self.epoch)
        x = (1 - share) * b["x"] + share * b["x"].flip(0)
        return F.cross_entropy(self(x), b["y"])

    def dice_of_the_batch(self, b: Batch) -> Tensor:
        guess, truth = self.tokens(b).sigmoid().mean(2).flatten(), b["mask"].double().flatten()
        return 1 - (2 * (guess * truth).sum() + 1) / (guess.sum() + truth.sum() + 1)

    def per_class_balanced(self, b: Batch) -> Tensor:
        counts = torch.bincount(b["y"], minlength=CLASSES).clamp(min=1)
        return (self.each(b) / counts[b["y"]]).sum() / CLASSES

    def weights_of_inverse_frequency(self, b: Batch) -> Tensor:
        counts = torch.stack([(b["y"] == one).sum() for one in range(CLASSES)]).clamp(min=1)
        return F.cross_entropy(self(b["x"]), b["y"], weight=len(b["y"]) / counts.double())

    def running_mean_of_the_loss(self, b: Batch) -> Tensor:
        loss = self.each(b).mean()
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * loss)
        return loss / (1 + self.average)

    def centre_of_a_teacher(self, b: Batch) -> Tensor:
        with torch.no_grad():
            wanted = (b["x"] - self.centre).softmax(1)
            self.centre.mul_(0.9).add_(0.1 * b["x"].mean(0))
        return -(wanted * self.two(b["x"]).log_softmax(1)).sum(1).mean()

    def warm_up_by_own_count(self, b: Batch) -> Tensor:
        self.step_number += 1
        return self.each(b).mean() * min(1.0, self.step_number / 3)

    def hardest_fifth(self, b: Batch) -> Tensor:
        return self.each(b).topk(max(1, len(b["x"]) // 5)).values.mean()

    def koleo(self, b: Batch) -> Tensor:
        near = self.near(b["x"])
        apart = (near @ near.t()).fill_diagonal_(-1)
        return self.each(b).mean() - 0.1 * (near - near[apart.argmax(1)]).norm(dim=1).log().mean()

    def load_balance(self, b: Batch) -> Tensor:
        routes = self(b["x"]).softmax(1)
        share = F.one_hot(routes.argmax(1), CLASSES).double().mean(0)
        return F.mse_loss(self.two(b["x"]), b["x"]) + 0.1 * CLASSES * (share * routes.mean(0)).sum()

    def advantages_over_the_batch(self, b: Batch) -> Tensor:
        gain = b["x"][:, 0]
        return (self.each(b) * (gain - gain.mean()) / (gain.std() + 1e-8)).mean()

    def rank_of_samples(self, b: Batch) -> Tensor:
        score, gain = self(b["x"])[:, 0], b["x"][:, 0]
        return F.softplus(-(score[:, None] - score) * (gain[:, None] - gain).sign()).mean()


class Either(Net):
    """Losses that may run split or whole."""

    def triplets_given(self, b: Batch) -> Tensor:
        return F.triplet_margin_loss(self.two(b["x"]), self.two(b["x"] + 1), self.two(b["x"] - 1))

    def queue_of_negatives(self, b: Batch) -> Tensor:
        anchor = self.near(b["x"])
        with torch.no_grad():
            key = F.normalize(b["x"], dim=1)
        scores = torch.cat([(anchor * key).sum(1, keepdim=True), anchor @ self.queue.t()], 1) / 0.2
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))

    def positives(self, b: Batch) -> Tensor:
        positive = b["y"] > 0
        positives = F.smooth_l1_loss(self.two(b["x"])[positive], b["x"][positive], reduction="sum")
        return (self.each(b).sum() + positives) / max(1, int(positive.sum()))

    def positives_in_a_tensor(self, b: Batch) -> Tensor:
        positive = (b["y"] > 0).double()
        return (self.each(b) * positive).sum() / positive.sum().clamp(min=1)

    def at_least_positives(self, b: Batch) -> Tensor:
        positive = (b["y"] > 0).double()
        return (self.each(b) * positive).sum() / positive.sum().clamp(min=8)

    def ctc(self, b: Batch) -> Tensor:
        scores = self.tokens(b).log_softmax(2).transpose(0, 1)
        lengths = torch.full((len(b["x"]),), STEPS)
        return F.ctc_loss(scores, b["y"][:, None] + 1, lengths, torch.ones_like(lengths))

    def packed(self, b: Batch) -> Tensor:
        rows = b["mask"].bool()
        return F.cross_entropy(self.tokens(b)[rows], b["ids"][rows])

    def weights_of_samples(self, b: Batch) -> Tensor:
        return (self.each(b) * b["gain"]).sum() / b["gain"].sum()

    def two_views_side_by_side(self, b: Batch) -> Tensor:
        one, two = self.near(torch.cat([b["x"], b["x"] + 0.1])).chunk(2)
        return -(one * two).sum(1).mean()

    def shifted_labels(self, b: Batch) -> Tensor:
        return F.cross_entropy(self(b["x"]), (b["y"] + 1) % CLASSES)

    def own_mean(self, b: Batch) -> Tensor:
        each = self.each(b)
        return sum(each[at] for at in range(len(each))) / len(each)

    def tokens_by_a_read_count(self, b: Batch) -> Tensor:
        each = F.cross_entropy(self.tokens(b).transpose(1, 2), b["ids"], reduction="none", ignore_index=0)
        return each.sum() / (b["ids"] != 0).sum().item()

    def accumulated_over_a_fixed_count(self, b: Batch) -> Tensor:
        return self.each(b).sum() / SAMPLES

    def long_batches_by_chunks(self, b: Batch) -> Tensor:
        chunks = zip(b["x"].split(4), b["y"].split(4), strict=True)
        return torch.cat([self.each({"x": x, "y": y}) for x, y in chunks]).mean()

    def mean_of_chunk_means(self, b: Batch) -> Tensor:
        chunks = zip(b["x"].split(5), b["y"].split(5), strict=True)
        return torch.stack([self.each({"x": x, "y": y}).mean() for x, y in chunks]).mean()

    def consistency_later(self, b: Batch) -> Tensor:
        guess = self(b["x"]).softmax(1)
        return self.each(b).mean() + 0.5 * self.epoch * (guess - guess.mean(0)).square().sum(1).mean()


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


LOSSES = {name: kind for kind in (Split, Whole, Either) for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_are_the_plain_ones(name: str) -> None:
    torch.manual_seed(0)
    model, loss = LOSSES[name](), getattr(LOSSES[name], name)
    plain, budgeted = (trained(loss, model, batches(), budget, _next_epoch) for budget in (False, True))

    assert budgeted.differs_from(plain) < 1e-7, f"split: {budgeted.split}; {budgeted.reason}"
    if LOSSES[name] is not Either:
        assert budgeted.split == (LOSSES[name] is Split), budgeted.reason
