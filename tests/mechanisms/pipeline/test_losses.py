"""By what micro-batches' losses are weighed: read off the operations behind the loss, or told, checked on a batch."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.parts import balanced_parts
from retime.mechanisms.pipeline import PipelineError
from retime.mechanisms.pipeline.calls import LayerInterceptors
from retime.mechanisms.pipeline.losses import FirstLook, LossWeights, look_at_losses

Step = Callable[[nn.Module, Any], Tensor]
CLASSES, TOKENS = 5, 11


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    of_features = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    of_tokens = nn.Sequential(nn.Embedding(TOKENS, 8), nn.Dropout(0.5), nn.Linear(8, TOKENS))
    return nn.ModuleDict({"x": of_features, "tokens": of_tokens})


def batch(*, padded: int = 0, empty: int = 0) -> dict[str, Tensor]:
    """Twelve samples; nothing in the last rows of labels, and no positive in the last rows of the mask."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, TOKENS, (12, 7), generator=drawn)
    labels = tokens.clone()
    labels[12 - padded :, 2:] = -100
    mask = torch.ones(12, CLASSES)
    mask[12 - empty :] = 0
    return {
        "x": torch.randn(12, 6, generator=drawn),
        "classes": torch.randint(0, CLASSES, (12,), generator=drawn),
        "several": torch.randint(0, CLASSES, (12, 2), generator=drawn),
        "wanted": torch.randn(12, CLASSES, generator=drawn),
        "tokens": tokens,
        "labels": labels,
        "mask": mask,
        "items": torch.tensor(7.0),
        "texts": ["some words"] * 2 + ["word", "and four words more"] + ["some words"] * 8,
    }


def look(step: Step, given: Any = None, loss_weight: Any = None, gates: bool = True) -> tuple[LossWeights, FirstLook]:
    net, given = model(), batch() if given is None else given
    layers = list(net["x"]) + list(net["tokens"])  # type: ignore[call-overload]
    return look_at_losses(
        net,
        lambda part: step(net, part),
        given,
        balanced_parts(given, 3),
        loss_weight=loss_weight,
        gates=LayerInterceptors(layers) if gates else None,
        names=list(map(str, range(len(layers)))),
    )


def error_of(net: Any, part: Any) -> Tensor:
    return (net["x"](part["x"]) - part["wanted"]).square()


def with_penalty(net: Any, part: Any) -> Tensor:
    return F.mse_loss(net["x"](part["x"]), part["wanted"]) + 0.1 * sum(p.square().sum() for p in net.parameters())


def added_in_place(net: Any, part: Any) -> Tensor:
    total = torch.zeros(())
    total += error_of(net, part).mean()
    total += 0.1 * net["x"](part["x"]).mean()
    return total


def focal(net: Any, part: Any) -> Tensor:
    each = F.cross_entropy(net["x"](part["x"]), part["classes"], reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def checked(net: Any, part: Any) -> Tensor:
    """Reads its batch to refuse some of it."""
    if int(part["tokens"].max()) >= TOKENS:
        raise ValueError("no such token")
    return error_of(net, part).mean()


def per_sample(net: Any, part: Any) -> Tensor:
    """Reductions, norms and attention over what one sample has, and a choice of one of its entries."""
    scores, wanted = net["x"](part["x"]), part["wanted"]
    rows = torch.arange(len(scores))
    states = F.layer_norm(net["tokens"](part["tokens"]), (TOKENS,))
    causal = torch.ones(7, 7).tril()
    attended = (states @ states.transpose(1, 2)).masked_fill(causal == 0, -9.0).softmax(-1) @ states
    attended = attended * torch.linspace(0, 1, 7)[None, :, None] + F.scaled_dot_product_attention(
        states, states, states
    )
    scaled = (scores - scores.mean(1, keepdim=True)) / (wanted / wanted.abs().amax(1, keepdim=True)).std(1)[:, None]
    chosen = -scores.log_softmax(-1)[rows, part["classes"]] + scores.gather(1, part["several"]).sort(1).values[:, 0]
    return scaled.square().mean() + (chosen * rows.new_ones(())).mean() + attended.square().sum((1, 2)).mean()


def shown_beside(net: Any, part: Any) -> Tensor:
    """Selects and reads by values for what is shown, not for the loss."""
    scores, right = net["x"](part["x"]), part["classes"] > 1
    net.shown = float((scores.argmax(1)[right] == part["classes"][right]).float().mean()), right.nonzero().shape[0]
    net.shown += (len(torch.unique(part["classes"])), sum(map(len, part["texts"])))
    return 0.5 * (scores - part["wanted"]).square().mean()


def by_distribution(net: Any, part: Any) -> Tensor:
    """Reads values to check them."""
    scores = net["x"](part["x"])
    chosen = torch.distributions.Categorical(logits=scores).log_prob(part["classes"])
    return -(chosen * part["wanted"][:, 0]).mean()


def read_perplexity(net: Any, part: Any) -> Tensor:
    """Cannot run on all numbers that it may read."""
    loss = error_of(net, part).mean()
    net.shown = math.exp(loss.item())
    return loss


def written_by_mask(net: Any, part: Any) -> Tensor:
    error = error_of(net, part)
    error[part["wanted"] > 0.5] = 0
    return error.mean()


def two_views(net: Any, part: Any) -> Tensor:
    both = net["x"](torch.cat([part["x"], 2 * part["x"]]))
    one, two = both.chunk(2)
    return F.cosine_similarity(one, two).mean() + (both[: len(both) // 2] * both[len(both) // 2 :]).mean()


def steps_in_a_row(net: Any, part: Any) -> Tensor:
    """Layers return [samples * steps, ...]."""
    rows = torch.stack([part["x"], part["x"] ** 2], 1).flatten(0, 1)
    return net["x"](rows).square().mean()


def written(net: Any, part: Any) -> Tensor:
    counts = part["wanted"].clone()
    counts[:, 0] = 0
    return (error_of(net, part) * counts).mean()


LABELS = "mean over count(batch['labels'] != -100)"
NEXT = "mean over count(batch['labels'][:, 1:] != -100)"
MEAN, SUM = "mean over samples", "sum over samples"
KNOWN: dict[str, tuple[Step, list[str]]] = {
    "classes": (
        lambda net, part: F.cross_entropy(net["x"](part["x"]), part["classes"]),
        ["mean over count(batch['classes'] != -100)"],
    ),
    "smoothed": (
        lambda net, part: F.cross_entropy(net["x"](part["x"]), part["classes"], label_smoothing=0.1),
        ["mean over count(batch['classes'] != -100)"],
    ),
    "columns": (
        lambda net, part: F.cross_entropy(net["x"](part["x"]), part["several"][:, 1]),
        ["mean over count(batch['several'][:, 1] != -100)"],
    ),
    "classes summed": (
        lambda net, part: F.cross_entropy(net["x"](part["x"]), part["classes"], torch.ones(CLASSES), reduction="sum"),
        [SUM],
    ),
    "probabilities": (lambda net, part: F.cross_entropy(net["x"](part["x"]), part["wanted"].softmax(-1)), [MEAN]),
    "computed labels": (lambda net, part: F.cross_entropy(net["x"](part["x"]), part["wanted"].argmax(1)), [MEAN]),
    "tokens": (
        lambda net, part: F.cross_entropy(net["tokens"](part["tokens"]).flatten(0, 1), part["labels"].flatten()),
        [LABELS],
    ),
    "tokens in a row": (
        lambda net, part: F.cross_entropy(net["tokens"](part["tokens"]).transpose(1, 2), part["labels"]),
        [LABELS],
    ),
    "next tokens": (
        lambda net, part: F.cross_entropy(
            net["tokens"](part["tokens"])[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten()
        ),
        [NEXT],
    ),
    "as transformers": (
        lambda net, part: F.cross_entropy(
            net["tokens"](part["tokens"].view(-1, 7)).view(-1, TOKENS),
            F.pad(part["labels"].view(-1, 7), (0, 1), value=-100)[..., 1:].contiguous().view(-1),
        ),
        [NEXT],
    ),
    "its own tokens": (
        lambda net, part: F.cross_entropy(
            net["tokens"](part["tokens"]).flatten(0, 1), part["tokens"].flatten(), ignore_index=0
        ),
        ["mean over count(batch['tokens'] != 0)"],
    ),
    "squares": (lambda net, part: F.mse_loss(net["x"](part["x"]), part["wanted"]), [MEAN]),
    "logits": (
        lambda net, part: F.binary_cross_entropy_with_logits(net["x"](part["x"]), part["mask"], part["mask"]),
        [MEAN],
    ),
    "divergence": (
        lambda net, part: F.kl_div(
            net["x"](part["x"]).log_softmax(-1), part["wanted"].softmax(-1), reduction="batchmean"
        ),
        [MEAN],
    ),
    "mean": (lambda net, part: error_of(net, part).mean(), [MEAN]),
    "sum": (lambda net, part: error_of(net, part).sum() / 100, [SUM]),
    "sum by samples": (lambda net, part: error_of(net, part).sum() / len(part["x"]), [MEAN]),
    "sum by a number of the batch": (lambda net, part: error_of(net, part).sum() / part["items"], [SUM]),
    "mean of sums": (lambda net, part: error_of(net, part).sum(0).mean(), [SUM]),
    "sum of means": (lambda net, part: error_of(net, part).mean(0).sum(), [MEAN]),
    "masked": (lambda net, part: (error_of(net, part) * part["mask"]).mean(), [MEAN]),
    "mean over a mask": (
        lambda net, part: (error_of(net, part) * part["mask"]).sum() / part["mask"].sum(),
        ["mean over sum(batch['mask'])"],
    ),
    "mean over a mask, never empty": (
        lambda net, part: (error_of(net, part) * part["mask"]).sum() / (part["mask"].sum() + 1e-6),
        ["mean over (sum(batch['mask']) + 1e-06)"],
    ),
    "over a count, at least 1": (
        lambda net, part: error_of(net, part).sum() / part["mask"].sum().clamp(min=1),
        ["mean over max(sum(batch['mask']), 1)"],
    ),
    "focal": (focal, [MEAN]),
    "several": (
        lambda net, part: 2 * error_of(net, part).mean() - 0.1 * F.cross_entropy(net["x"](part["x"]), part["classes"]),
        [MEAN, "mean over count(batch['classes'] != -100)"],
    ),
    "stacked": (lambda net, part: torch.stack([error_of(net, part).mean()] * 2).mean(), [MEAN]),
    "in place": (added_in_place, [MEAN]),
    "penalty": (with_penalty, [MEAN]),
    "learned weight": (
        lambda net, part: error_of(net, part).mean() * net["x"][0].bias[0].exp() - net["x"][0].bias[0],
        [MEAN],
    ),
    "checked": (checked, [MEAN]),
    "shown beside": (shown_beside, [MEAN]),
    "distribution": (by_distribution, [MEAN]),
    "read perplexity": (read_perplexity, [MEAN]),
    "written by mask": (written_by_mask, [MEAN]),
    "two views": (two_views, [MEAN]),
    "steps in a row": (steps_in_a_row, [MEAN]),
    "per sample": (per_sample, [MEAN]),
    "written": (written, [MEAN]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_heads_that_are_known(name):
    """Weights fit the first batch, and another with more padding, whose micro-batches have unlike numbers of labels."""
    step, expected = KNOWN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, seen = look(step)
    assert list(map(str, weights.weightings)) == expected
    assert len(seen.examples) == 2, "with noise too"
    net, other = model().eval(), batch(padded=6)
    parts = balanced_parts(other, 3)
    total = sum(w * float(step(net, part).detach()) for w, part in zip(weights.of(other, parts), parts, strict=True))
    assert total == pytest.approx(float(step(net, other).detach()), rel=1e-5)


def by_item(net: Any, part: Any) -> Tensor:
    return (error_of(net, part) * part["mask"]).sum() / max(1, int(part["mask"].sum()))


def by_branch(net: Any, part: Any) -> Tensor:
    loss = error_of(net, part).mean()
    return loss + net["x"](part["x"]).mean() if bool(part["mask"].any()) else loss


def divided_by(error: Tensor, mean: Tensor) -> Tensor:
    return (error / mean).mean()


INFLUENCE = "samples of a batch influence one another"
BY_BATCH = "`div` (test_losses.py:"
READ = "depends on values of the batch that are read"
UNKNOWN: dict[str, tuple[Step, str]] = {
    "clamped count": (
        lambda net, part: error_of(net, part).sum() / (part["mask"] > 0).sum().clamp(min=1),
        BY_BATCH,
    ),
    "items": (by_item, READ),
    "numpy": (lambda net, part: error_of(net, part).sum() / float(part["mask"].numpy().sum()), READ),
    "list": (lambda net, part: error_of(net, part).sum() / sum(map(sum, part["mask"].tolist())), READ),
    "branch": (by_branch, READ),
    "counted by numpy": (
        lambda net, part: error_of(net, part).sum() / max(1, int(numpy.count_nonzero(part["mask"].numpy()))),
        READ,
    ),
    "counted in a list": (
        lambda net, part: error_of(net, part).sum() / max(1, sum(v != 0 for v in part["mask"][:, 0].tolist())),
        READ,
    ),
    "where": (lambda net, part: error_of(net, part).sum() / max(1, torch.where(part["mask"] > 0)[0].numel()), READ),
    "rows": (lambda net, part: error_of(net, part).sum() / max(1, (part["mask"] > 0).nonzero().shape[0]), READ),
    "rows chosen": (lambda net, part: error_of(net, part).sum() / len(part["x"][part["mask"][:, 0] > 0]), READ),
    "kinds": (lambda net, part: error_of(net, part).sum() / torch.unique(part["mask"]).numel(), READ),
    "masked rows": (
        lambda net, part: error_of(net, part).sum() / max(1, part["mask"].masked_select(part["mask"] > 2).numel()),
        READ,
    ),
    "texts": (
        lambda net, part: error_of(net, part).sum() / max(1, sum(len(t) > 11 for t in part["texts"])),
        READ,
    ),
    "words": (
        lambda net, part: error_of(net, part).sum() / sum(len(t.split()) for t in part["texts"]),
        "is divided by a number that is neither",
    ),
    "chosen": (lambda net, part: error_of(net, part)[part["mask"] > 0].mean(), "values that `index`"),
    "selected": (
        lambda net, part: torch.masked_select(error_of(net, part), part["mask"] > 0).mean(),
        "values that `masked_select`",
    ),
    "by numbers": (
        lambda net, part: error_of(net, part)[part["mask"][:, 0].nonzero()[:, 0]].mean(),
        "values that `nonzero`",
    ),
    "class weights": (
        lambda net, part: F.cross_entropy(net["x"](part["x"]), part["classes"], torch.ones(CLASSES)),
        "is a mean by class weights",
    ),
    "labels left out": (
        lambda net, part: F.cross_entropy(
            net["x"](part["x"]), part["classes"].masked_fill(part["mask"][:, 0] < 1, -100)
        ),
        "computed by `masked_fill`",
    ),
    "exp": (lambda net, part: error_of(net, part).mean().exp(), "it goes through `exp`"),
    "root": (lambda net, part: error_of(net, part).mean().sqrt(), "it goes through `sqrt`"),
    "product": (lambda net, part: error_of(net, part).mean() * net["x"](part["x"]).mean(), "multiplies two values"),
    "largest": (lambda net, part: error_of(net, part).max(), "it goes through `max`"),
    "hardest": (lambda net, part: error_of(net, part).mean(1).topk(2).values.mean(), "it goes through `topk`"),
    "one sample": (lambda net, part: error_of(net, part).mean() + net["x"](part["x"])[0, 0], "some of the samples"),
    "mean and sum": (lambda net, part: error_of(net, part).mean() + error_of(net, part).sum(), "a mean and a sum"),
    "sum and penalty": (
        lambda net, part: error_of(net, part).sum() + net["x"][0].weight.square().sum(),
        "the same for each micro-batch",
    ),
    "shares of classes": (
        lambda net, part: F.binary_cross_entropy_with_logits(
            net["x"](part["x"]), part["mask"], pos_weight=(part["mask"] == 0).sum() / (part["mask"] == 1).sum()
        ),
        "in `sum` (test_losses.py",
    ),
    "weights of mean 1": (
        lambda net, part: F.binary_cross_entropy_with_logits(
            net["x"](part["x"]), part["mask"], part["mask"] / part["mask"].mean()
        ),
        "in `mean` (test_losses.py",
    ),
    "weighted by a mean": (
        lambda net, part: (error_of(net, part) * part["mask"] / part["mask"].mean()).mean(),
        "in `mean` (test_losses.py",
    ),
    "weighted by the largest": (
        lambda net, part: (error_of(net, part) * part["mask"] / part["mask"].max()).mean(),
        "in `max` (test_losses.py",
    ),
    "by a share": (
        lambda net, part: (error_of(net, part) / (part["mask"] > 0).float().mean().clamp(min=0.1)).mean(),
        "in `mean` (test_losses.py",
    ),
    "added inside": (
        lambda net, part: (
            error_of(net, part) + (net["x"](part["x"]) * part["mask"]).sum() / part["mask"].sum()
        ).mean(),
        "in `sum` (test_losses.py",
    ),
    "by itself": (lambda net, part: divided_by(error_of(net, part), error_of(net, part).detach().mean()), INFLUENCE),
    "advantages": (
        lambda net, part: (
            error_of(net, part).mean() + (net["x"](part["x"]) * (part["wanted"] - part["wanted"].mean())).mean()
        ),
        "in `mean` (test_losses.py",
    ),
    "normalised": (
        lambda net, part: (
            error_of(net, part) * (part["wanted"] - part["wanted"].mean(0)) / part["wanted"].std(0)
        ).mean(),
        INFLUENCE,
    ),
    "read inside": (
        lambda net, part: (error_of(net, part) * part["mask"] / float(part["mask"].mean())).mean(),
        READ,
    ),
    "softmax of samples": (
        lambda net, part: (error_of(net, part).mean(1) * part["wanted"].mean(1).softmax(0)).sum(),
        "in `_softmax`",
    ),
    "running sum": (lambda net, part: (error_of(net, part) * part["mask"].cumsum(0)).sum(), "in `cumsum`"),
    "ranks": (lambda net, part: (error_of(net, part).mean(1).sort().values * 0.5).mean(), "in `sort`"),
    "neighbours": (
        lambda net, part: (net["x"](part["x"])[1:] - net["x"](part["x"])[:-1]).square().sum(),
        "in `slice`",
    ),
    "others": (lambda net, part: (net["x"](part["x"]) - part["wanted"][part["x"][:, 0].argsort()]).mean(), INFLUENCE),
    "pairs": (
        lambda net, part: (net["x"](part["x"])[:, None] - part["wanted"][None]).square().mean(),
        "neither the same for all batches nor grows with the samples",
    ),
    "batch statistics": (
        lambda net, part: F.batch_norm(net["x"](part["x"]), None, None, training=True).square().mean(),
        "batch_norm",
    ),
    "in a matrix": (
        lambda net, part: (part["wanted"].T @ net["x"](part["x"])).square().mean(),
        "it goes through `pow`",
    ),
    "window": (
        lambda net, part: torch.cat([error_of(net, part).mean(1)[:2].mean()[None]]).sum(),
        "`slice` (test_losses.py",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_heads_are_refused_by_name(name):
    step, what = UNKNOWN[name]
    with pytest.raises(PipelineError) as refused:
        look(step)
    text = str(refused.value)
    assert what in text
    assert "use a mean or a sum over samples or labels; or say what the step divides by, with loss_weight=" in text
    assert text.endswith("or use microbatches=1")


def contrasted(net: Any, part: Any) -> Tensor:
    features = net["x"](part["x"])
    return F.cross_entropy(features @ features.T, torch.arange(len(features)))


def test_samples_that_influence_one_another_are_refused():
    with pytest.raises(PipelineError, match="samples of a batch influence one another"):
        look(contrasted)


def test_what_is_the_same_only_for_samples_that_are_alike_is_refused():
    """Until layers return something else, all samples are the same."""

    def varied(net: Any, part: Any) -> Tensor:
        features = net["x"](part["x"])
        return (features - part["wanted"]).square().mean() + (features - features.mean(0)).square().mean()

    alike = {
        name: tensor[:1].expand(12, *tensor.shape[1:]) if isinstance(tensor, Tensor) and tensor.dim() else tensor
        for name, tensor in batch().items()
    }
    with pytest.raises(PipelineError, match="loss of layers whose outputs were changed at random"):
        look(varied, alike, loss_weight="samples")
    assert look(varied, alike, loss_weight="samples", gates=False)[0]


def test_noise_stays_within_what_layers_return():
    """Probabilities: those above 1 would be an error of the loss's."""
    net, given = nn.Sequential(nn.Linear(6, CLASSES), nn.Sigmoid()), batch()
    weights, seen = look_at_losses(
        net,
        lambda part: F.binary_cross_entropy(net(part["x"]), part["mask"]),
        given,
        balanced_parts(given, 3),
        gates=LayerInterceptors(list(net)),
        names=["0", "1"],
    )
    assert list(map(str, weights.weightings)) == [MEAN]
    assert len(seen.examples) == 2
    assert float(seen.examples[0].whole) != float(seen.examples[1].whole)


def counted(net: Any, part: Any) -> Tensor:
    """RetinaNet's way."""
    each = F.binary_cross_entropy_with_logits(net["x"](part["x"]), part["mask"], reduction="none")
    return each.sum() / (part["mask"] > 0).sum().clamp(min=1)


def masked(net: Any, part: Any) -> Tensor:
    return (error_of(net, part) * part["mask"]).sum() / part["mask"].sum()


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (counted, lambda part: (part["mask"] > 0).sum().clamp(min=1)),
        (masked, lambda part: float(part["mask"].sum())),
        (by_item, lambda part: max(1, int(part["mask"].sum()))),
        (lambda net, part: error_of(net, part).mean(), "samples"),
        (lambda net, part: error_of(net, part).sum(), "sum"),
    ],
)
def test_a_loss_weight_that_is_told(step, told):
    """Also for micro-batches that have nothing of what is counted."""
    weights, _ = look(step, loss_weight=told)
    net, other = model(), batch(empty=8)
    parts = balanced_parts(other, 3)
    losses = [float(step(net, part).detach()) for part in parts]
    total = sum(weight * loss for weight, loss in zip(weights.of(other, parts), losses, strict=True) if weight)
    assert total == pytest.approx(float(step(net, other).detach()), rel=1e-5)


def test_a_loss_weight_that_does_not_fit_the_first_batch_is_refused():
    for told in ("samples", "sum", lambda part: part["mask"].sum().square()):
        with pytest.raises(PipelineError, match="weighed by loss_weight=, add up to"):
            look(counted, batch(empty=5), told)


@pytest.mark.parametrize("given", [-1, math.nan, math.inf, "many", None, torch.ones(2)])
def test_a_loss_weight_has_to_give_a_number(given):
    with pytest.raises(PipelineError, match=r"loss_weight=\.\.\. gave .* for the whole batch: it has to give a finite"):
        look(counted, loss_weight=lambda _: given)
    with pytest.raises(PipelineError, match="gave 0 for a whole batch"):
        look(counted, loss_weight=lambda _: 0)


def test_means_over_samples_in_parts_of_several_sizes():
    net, given = nn.Linear(4, 1), torch.randn(10, 4)
    parts = balanced_parts(given, 3)
    weights, _ = look_at_losses(net, lambda part: net(part).square().mean(), given, parts)
    assert weights.of(given, parts) == [0.3, 0.3, 0.2, 0.2]


def test_what_counts_for_nothing_weighs_nothing():
    weights, _ = look(KNOWN["tokens"][0])
    other = batch()
    other["labels"][:6] = -100
    assert weights.of(other, balanced_parts(other, 3)) == [0.0, 0.0, 0.5, 0.5]


def test_several_means_have_to_agree():
    weights, _ = look(KNOWN["several"][0])
    other = batch()
    other["classes"][:3] = -100
    with pytest.raises(PipelineError, match=r"cannot be weighed as those of the first one.*or use microbatches=1"):
        weights.of(other, balanced_parts(other, 3))


def test_losses_without_a_value_are_weighed_by_their_operations():
    tokens = KNOWN["tokens"][0]
    for factor in (lambda: 1 + torch.rand(()), lambda: math.nan):
        weights, seen = look(lambda net, part, factor=factor: tokens(net, part) * factor())
        assert list(map(str, weights.weightings)) == [LABELS]
        assert not seen.examples


def test_a_first_batch_of_one_sample_shows_nothing():
    net, given = nn.Linear(4, 1), torch.randn(1, 4)
    weights, _ = look_at_losses(net, lambda part: net(part).mean(), given, [given])
    assert weights.of(given, [given]) == [1.0]
    with pytest.raises(PipelineError, match="the first batch had one micro-batch"):
        weights.of(given, [given, given])
    weights, _ = look_at_losses(net, lambda part: net(part).mean(), given, [given], loss_weight="samples")
    assert weights.of(given, [given, given]) == [0.5, 0.5]


def test_steps_that_cannot_be_followed_are_refused():
    def step(net: Any, part: Any) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not watched"):
            return error_of(net, part).mean()

    with pytest.raises(PipelineError, match=r"cannot be followed \(RuntimeError: not watched\).*loss_weight='samples'"):
        look(step)
    assert look(step, loss_weight="samples")[1].examples
