"""What a loss is a mean over is known from the operations, not from the values that were probed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retime.foundations.parts.combine import Certificate, WeightsUnclearError, loss_weights
from retime.foundations.parts.split import split_batch
from retime.mechanisms.memory_budget.separability.certify import certify
from support.memory_losses import CLASSES, FEATURES, STEPS, Learner

SAMPLES, IGNORED = 11, -100
Loss = Callable[[Learner, dict[str, Tensor]], Tensor]


def batch_of(seed: int = 3) -> dict[str, Tensor]:
    """Ragged class numbers, masks and weights; ``valid`` and ``there`` keep everything, lengths are short."""
    torch.manual_seed(seed)
    classes = torch.randint(1, CLASSES, (SAMPLES, STEPS))
    return {
        "x": torch.randn(SAMPLES, FEATURES),
        "classes": classes,
        "labels": classes.masked_fill(torch.rand(SAMPLES, STEPS) < 0.4, IGNORED),
        "keep": torch.rand(SAMPLES) < 0.7,
        "valid": torch.ones(SAMPLES, dtype=torch.bool),
        "there": torch.ones(SAMPLES, STEPS, dtype=torch.int64),
        "mask": torch.randint(0, 2, (SAMPLES, STEPS)),
        "lengths": torch.randint(1, STEPS, (SAMPLES,)),
        "weights": torch.rand(SAMPLES),
        "pairs": torch.randint(CLASSES, (SAMPLES, 2)),
    }


def certificate_of(loss: Loss) -> Certificate:
    batch = batch_of()
    model = Learner()
    return certify(lambda part: loss(model, part), batch, model)


def steps(m: Learner, b: dict[str, Tensor]) -> Tensor:
    """Class scores of each step."""
    return m(b["x"][:, None] * torch.arange(STEPS)[:, None])


def of_steps(m: Learner, b: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(steps(m, b).flatten(0, 1), labels.flatten())


def mean_over(chosen: Tensor, each: Tensor) -> Tensor:
    return (each * chosen).sum() / chosen.sum()


def each_sample(m: Learner, b: dict[str, Tensor]) -> Tensor:
    return m(b["x"]).square().sum(1)


def each_step(m: Learner, b: dict[str, Tensor]) -> Tensor:
    return steps(m, b).square().sum(2)


def _written_into(m: Learner, b: dict[str, Tensor]) -> Tensor:
    labels = b["labels"].clone()
    labels[b["there"] == 0] = IGNORED
    return of_steps(m, b, labels)


UNKNOWN: dict[str, Loss] = {
    "two masks": lambda m, b: mean_over(b["keep"] & b["valid"], each_sample(m, b)),
    "chosen by two masks": lambda m, b: each_sample(m, b)[b["keep"] & b["valid"]].mean(),
    "weights and a mask": lambda m, b: mean_over(b["weights"] * b["valid"], each_sample(m, b)),
    "two numbers": lambda m, b: mean_over((b["labels"] != IGNORED) & (b["labels"] != 0), each_step(m, b)),
    "mask of lengths": lambda m, b: mean_over(torch.arange(STEPS) < b["lengths"][:, None], each_step(m, b)),
    "clipped lengths": lambda m, b: mean_over(b["lengths"].clamp(max=STEPS), each_sample(m, b)),
    "labels filled by a mask": lambda m, b: of_steps(m, b, b["classes"].masked_fill(b["there"] == 0, IGNORED)),
    "labels where a mask is": lambda m, b: of_steps(m, b, torch.where(b["there"] == 1, b["labels"], IGNORED)),
    "labels written into": _written_into,
    "rows that have any": lambda m, b: mean_over((b["mask"].sum(1) > 0), each_sample(m, b)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_count_that_only_agrees_with_the_samples_probed_is_not_taken(name: str) -> None:
    assert not certificate_of(UNKNOWN[name]).separable


KNOWN: dict[str, tuple[Loss, str]] = {
    "mask": (lambda m, b: mean_over(b["keep"].float(), each_sample(m, b)), "count(batch['keep'] == 1)"),
    "not masked": (lambda m, b: mean_over(~b["keep"], each_sample(m, b)), "count(batch['keep'] == 0)"),
    "whole numbers": (lambda m, b: mean_over(b["mask"].float(), each_step(m, b)), "sum(batch['mask'])"),
    "as truth": (lambda m, b: mean_over(b["mask"].bool(), each_step(m, b)), "count(batch['mask'] != 0)"),
    "by rows": (
        lambda m, b: (each_step(m, b) * b["mask"]).sum() / b["mask"].sum(1).sum().clamp(min=1),
        "max(sum(batch['mask']), 1)",
    ),
    "shifted": (lambda m, b: mean_over(b["mask"][:, 1:], each_step(m, b)[:, 1:]), "sum(batch['mask'][:, 1:])"),
    "never zero": (
        lambda m, b: (each_sample(m, b) * b["weights"]).sum() / (b["weights"].sum() + 1e-8),
        "(sum(batch['weights']) + 1e-08)",
    ),
    "padded and shifted": (
        lambda m, b: of_steps(m, b, F.pad(b["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()),
        "count(batch['labels'][:, 1:] != -100)",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_counts_are_followed_through_operations_that_keep_them(name: str) -> None:
    loss, count = KNOWN[name]

    assert str(certificate_of(loss).weighting) == f"mean over {count}"


EMPTY: dict[str, Loss] = {
    "at least 1": lambda m, b: each_sample(m, b).sum() / b["keep"].sum().clamp(min=1),
    "at least 1, compared": lambda m, b: each_step(m, b).sum() / (b["mask"] > 0).sum().float().clamp_min(1),
    "at least 0.1": lambda m, b: each_sample(m, b).sum() / b["weights"].sum().clamp(min=0.1),
    "never zero": lambda m, b: each_sample(m, b).sum() / (b["keep"].sum() + 1e-3),
    "one more": lambda m, b: each_sample(m, b).sum() / (1 + b["keep"].sum()),
    "masked": lambda m, b: mean_over(b["keep"], each_sample(m, b)),
    "masked, and at least 1": lambda m, b: (each_step(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
    "chosen": lambda m, b: each_sample(m, b)[b["keep"]].sum() / b["keep"].sum(),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_count_that_is_0_in_a_part_weighs_it_as_the_step_does(name: str, kept: int) -> None:
    """As a detector's number of objects, which its losses are divided by and not masked by."""
    model, batch = Learner(), batch_of(5)
    for key in ("keep", "mask", "weights"):
        batch[key][kept:] = 0
        batch[key][:kept] = 1
    parts = split_batch(batch, 4)
    certificate = certificate_of(EMPTY[name])
    weights = loss_weights(certificate, parts)

    whole = EMPTY[name](model, batch)
    summed = sum(weight * EMPTY[name](model, part) for weight, part in zip(weights, parts, strict=True) if weight)

    if whole.isfinite():  # a mean over nothing in all of the batch has no value
        torch.testing.assert_close(summed, whole)
        expected = torch.autograd.grad(whole, [*model.parameters()], allow_unused=True)
        gradients = torch.autograd.grad(summed, [*model.parameters()], allow_unused=True)
        # 1 / 0.001 times the rounding of sums, which processors do in different orders
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
    else:
        assert kept == 0


def test_a_part_without_what_its_loss_is_divided_by_has_no_weight() -> None:
    certificate = certificate_of(lambda m, b: each_sample(m, b).sum() / b["keep"].sum())
    batch = batch_of()

    batch["keep"][:] = True
    assert loss_weights(certificate, split_batch(batch, 4)) == pytest.approx([4 / 11, 4 / 11, 3 / 11])
    batch["keep"][:4] = False
    with pytest.raises(WeightsUnclearError, match=r"batch\['keep'\] == 1\), which the loss divides by, is 0 in"):
        loss_weights(certificate, split_batch(batch, 4))


def test_class_numbers_of_a_column_that_are_left_out_are_counted_in_each_batch() -> None:
    certificate = certificate_of(lambda m, b: F.cross_entropy(m(b["x"]), b["pairs"][:, 0]))
    other = batch_of(4)
    other["pairs"][torch.arange(SAMPLES), torch.randint(2, (SAMPLES,))] = IGNORED  # one of each pair

    assert str(certificate.weighting) == "mean over count(batch['pairs'][:, 0] != -100)"
    assert loss_weights(certificate, split_batch(batch_of(4), 4)) == pytest.approx([4 / 11, 4 / 11, 3 / 11])
    kept = [int((part["pairs"][:, 0] != IGNORED).sum()) for part in split_batch(other, 4)]
    assert loss_weights(certificate, split_batch(other, 4)) == pytest.approx([one / sum(kept) for one in kept])


def test_weights_of_both_signs_weigh_parts_below_0_too() -> None:
    """As advantages: a part whose weights add up to less than 0 is trained on, too."""
    model, batch = Learner(), batch_of()
    batch["weights"][:] = torch.tensor([1.0, -2, -3, 1, 2, 2, 1, 0, 1, 1, 0])
    parts = split_batch(batch, 4)

    def loss(m: Learner, b: dict[str, Tensor]) -> Tensor:
        return mean_over(b["weights"], each_sample(m, b))

    weights = loss_weights(certificate_of(loss), parts)

    assert weights == pytest.approx([-3 / 4, 5 / 4, 2 / 4])
    torch.testing.assert_close(
        sum(weight * loss(model, part) for weight, part in zip(weights, parts, strict=True)), loss(model, batch)
    )


def test_weights_that_cancel_in_a_part_have_no_share() -> None:
    """As advantages of both signs: what is divided by their sum is not 0 where that is."""
    certificate = certificate_of(lambda m, b: mean_over(b["weights"], each_sample(m, b)))
    batch = batch_of()

    batch["weights"][:] = torch.tensor([1.0, -1, 2, -2, 1, 1, 1, 1, 1, 1, 1])
    with pytest.raises(WeightsUnclearError, match=r"which the loss divides by, is 0 in this batch or in a"):
        loss_weights(certificate, split_batch(batch, 4))
    batch["weights"][:4] = 0
    assert loss_weights(certificate, split_batch(batch, 4)) == pytest.approx([0, 4 / 7, 3 / 7])
    batch["weights"][:5] = torch.tensor([-2.0, -2, -2, 0, 0])
    with pytest.raises(WeightsUnclearError):
        loss_weights(certificate, split_batch(batch, 4))


def test_samples_that_nothing_is_learned_from_say_nothing() -> None:
    """As the last of a batch that is filled up with ignored labels."""
    model, batch = Learner(), batch_of()
    batch["labels"][6:] = IGNORED

    certificate = certify(lambda part: of_steps(model, part, part["labels"]), batch, model)

    assert str(certificate.weighting) == "mean over count(batch['labels'] != -100)"
