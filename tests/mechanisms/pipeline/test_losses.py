"""By what micro-batches' losses are weighed: followed through the step's operations, checked on the first batch."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.mechanisms.memory.batches import balanced_parts
from retime.mechanisms.no_effect import NoEffectWarning
from retime.mechanisms.pipeline import PipelineError
from retime.mechanisms.pipeline.losses import certified, weights_of

Step = Callable[[nn.Module, Any], Tensor]


def padded(tokens: Tensor, *rows: int) -> dict[str, Tensor]:
    """A batch of tokens, with padding in the labels of these rows."""
    labels = tokens.clone()
    labels[list(rows), 2:] = -100
    return {"tokens": tokens, "labels": labels, "mask": labels != -100}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.5), nn.Linear(8, 11))


def each(model: nn.Module, part: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(part["tokens"]).flatten(0, 1), labels.flatten(), reduction="none")


def tokens_mean(model: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(model(part["tokens"]).flatten(0, 1), part["labels"].flatten())


def next_tokens_mean(model: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(model(part["tokens"])[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten())


def masked_mean(model: nn.Module, part: Any) -> Tensor:
    return (each(model, part, part["tokens"]) * part["mask"].flatten()).sum() / part["mask"].sum()


def chosen_mean(model: nn.Module, part: Any) -> Tensor:
    return each(model, part, part["tokens"])[part["mask"].flatten()].mean()


def with_decay(model: nn.Module, part: Any) -> Tensor:
    return tokens_mean(model, part) + 0.1 * model[2].weight.square().sum()


COUNTED: dict[Step, str] = {
    tokens_mean: "count(batch['labels'] != -100)",
    next_tokens_mean: "count(batch['labels'][:, 1:] != -100)",
    masked_mean: "count(batch['mask'] == 1)",
    chosen_mean: "count(batch['mask'] == 1)",
    with_decay: "count(batch['labels'] != -100)",
}
TOKENS = torch.arange(48).reshape(8, 6) % 11


@pytest.mark.parametrize("step", COUNTED)
def test_a_mean_over_what_is_counted_in_the_batch(step):
    """Although each micro-batch of the first batch has as much of it."""
    net, batch = model(), padded(TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certificate, examples = certified(net, lambda part: step(net, part), batch, balanced_parts(batch, 2))
    assert str(certificate.weighting) == f"mean over {COUNTED[step]}"
    assert examples is not None
    assert examples.weights == [0.25] * 4
    assert net.training
    other = padded(TOKENS, 0, 1, 2)
    parts = balanced_parts(other, 2)
    weights = weights_of(certificate, parts)
    net.eval()
    found = sum(weight * float(step(net, part).detach()) for weight, part in zip(weights, parts, strict=True))
    assert len(set(weights)) > 1
    assert found == pytest.approx(float(step(net, other).detach()), rel=1e-5)


def test_means_and_sums_over_samples():
    net, batch = nn.Linear(4, 1), torch.randn(10, 4)
    parts = balanced_parts(batch, 3)
    mean, _ = certified(net, lambda part: net(part).square().mean(), batch, parts)
    assert weights_of(mean, parts) == [0.3, 0.3, 0.2, 0.2]
    total, _ = certified(net, lambda part: net(part).square().sum(), batch, parts)
    assert weights_of(total, parts) == [1.0] * 4


def test_what_counts_for_nothing_weighs_nothing():
    net, batch = model(), padded(TOKENS)
    certificate, _ = certified(net, lambda part: masked_mean(net, part), batch, balanced_parts(batch, 2))
    batch["mask"] = torch.arange(8)[:, None].expand(8, 6) > 3
    assert weights_of(certificate, balanced_parts(batch, 2)) == [0.0, 0.0, 0.5, 0.5]


def test_losses_that_cannot_be_weighed_are_refused():
    net, batch = nn.Linear(4, 4), torch.randn(8, 4)
    contrasted = lambda part: F.cross_entropy(net(part) @ net(part).T, torch.arange(len(part)))  # noqa: E731
    with pytest.raises(PipelineError, match=r"neither the mean over its samples nor their sum .*use microbatches=1"):
        certified(net, contrasted, batch, balanced_parts(batch, 2))


def of_several(net: nn.Module, part: Any) -> Tensor:
    """Each mean over other tokens."""
    other = F.cross_entropy(net(part["tokens"]).flatten(0, 1), part["others"].flatten())
    return tokens_mean(net, part) + other


def test_several_means_have_to_agree():
    net = model()
    batch = padded(TOKENS) | {"others": TOKENS.clone()}
    certificate, _ = certified(net, lambda part: of_several(net, part), batch, balanced_parts(batch, 2))
    alike = padded(TOKENS, 0, 1) | {"others": padded(TOKENS, 0, 1)["labels"]}
    assert weights_of(certificate, balanced_parts(alike, 2))[0] < 0.25
    unlike = padded(TOKENS, 0, 1) | {"others": TOKENS.clone()}
    with pytest.raises(PipelineError, match=r"cannot be weighed as those of the first one.*use microbatches=1"):
        weights_of(certificate, balanced_parts(unlike, 2))


def read_out(net: nn.Module, part: Any) -> Tensor:
    """What is counted goes through Python."""
    return (each(net, part, part["tokens"]) * part["mask"].flatten()).sum() / int(part["mask"].sum())


def by_class_weights(net: nn.Module, part: Any) -> Tensor:
    weights = torch.where(torch.arange(11) < 6, 1.0, 1.0)
    return F.cross_entropy(net(part["tokens"]).flatten(0, 1), part["labels"].flatten(), weights)


@pytest.mark.parametrize("step", [read_out, by_class_weights])
def test_what_only_fits_the_first_batch_is_told(step):
    net, batch = model(), padded(TOKENS)
    with pytest.warns(NoEffectWarning, match="taken for a mean over samples, as in the first batch"):
        certificate, _ = certified(net, lambda part: step(net, part), batch, balanced_parts(batch, 2))
    assert weights_of(certificate, balanced_parts(batch, 2)) == [0.25] * 4
    batch = padded(TOKENS, 0, 1)
    with pytest.raises(PipelineError, match="neither"):
        certified(net, lambda part: step(net, part), batch, balanced_parts(batch, 2))


def test_checks_of_values_change_nothing():
    """A step that reads its batch to refuse some of it, or to count what it logs."""
    net, batch, seen = model(), padded(TOKENS), []

    def step(part: Any) -> Tensor:
        if int(part["tokens"].max()) > 10:
            raise ValueError("no such token")
        seen.append(float(part["mask"].float().mean()))
        return tokens_mean(net, part)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certificate, _ = certified(net, step, batch, balanced_parts(batch, 2))
    assert "labels" in str(certificate.weighting)


def test_losses_without_a_value_are_weighed_by_their_operations():
    net, batch = model(), padded(TOKENS)

    def noisy(part: Any) -> Tensor:
        return tokens_mean(net, part) * (1 + torch.rand(()))

    certificate, examples = certified(net, noisy, batch, balanced_parts(batch, 2))
    assert "labels" in str(certificate.weighting)
    assert examples is None
    certificate, examples = certified(net, lambda part: tokens_mean(net, part) * math.nan, batch, [batch, batch])
    assert "labels" in str(certificate.weighting)
    assert examples is None


def test_a_first_batch_of_one_sample_shows_nothing():
    net, batch = nn.Linear(4, 1), torch.randn(1, 4)
    certificate, _ = certified(net, lambda part: net(part).mean(), batch, [batch])
    assert weights_of(certificate, [batch]) == [1.0]
    with pytest.raises(PipelineError, match="the first batch had one micro-batch"):
        weights_of(certificate, [batch, batch])


def test_steps_that_cannot_be_followed_are_taken_as_they_show():
    net, batch = nn.Linear(4, 1), torch.randn(8, 4)

    def step(part: Any) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not watched"):
            return net(part).mean()

    with pytest.warns(NoEffectWarning, match=r"cannot be followed \(RuntimeError: not watched\)"):
        certificate, _ = certified(net, step, batch, balanced_parts(batch, 2))
    assert str(certificate.weighting) == "mean over samples"
