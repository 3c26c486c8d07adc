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

CLASSES, TOKENS = 5, 11


class Part:
    """A batch, or a part of it, by its tensors' names; beside the model, and what that makes of it."""

    def __init__(self, net: Any, tensors: dict[str, Any]) -> None:
        self.net, self._tensors = net, tensors

    def __getattr__(self, name: str) -> Any:
        return self._tensors[name]

    @property
    def scores(self) -> Tensor:
        return self.net["x"](self.x)

    @property
    def states(self) -> Tensor:
        return self.net["tokens"](self.tokens)

    @property
    def error(self) -> Tensor:
        return (self.scores - self.wanted).square()


Step = Callable[[Part], Tensor]


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
        lambda part: step(Part(net, part)),
        given,
        balanced_parts(given, 3),
        loss_weight=loss_weight,
        gates=LayerInterceptors(layers) if gates else None,
        names=list(map(str, range(len(layers)))),
    )


def with_penalty(p: Part) -> Tensor:
    return F.mse_loss(p.scores, p.wanted) + 0.1 * sum(one.square().sum() for one in p.net.parameters())


def added_in_place(p: Part) -> Tensor:
    total = torch.zeros(())
    total += p.error.mean()
    total += 0.1 * p.scores.mean()
    return total


def focal(p: Part) -> Tensor:
    each = F.cross_entropy(p.scores, p.classes, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def checked(p: Part) -> Tensor:
    """Reads its batch to refuse some of it."""
    if int(p.tokens.max()) >= TOKENS:
        raise ValueError("no such token")
    return p.error.mean()


def per_sample(p: Part) -> Tensor:
    """Reductions, norms and attention over what one sample has, and a choice of one of its entries."""
    scores, wanted = p.scores, p.wanted
    rows = torch.arange(len(scores))
    states = F.layer_norm(p.states, (TOKENS,))
    causal = torch.ones(7, 7).tril()
    attended = (states @ states.transpose(1, 2)).masked_fill(causal == 0, -9.0).softmax(-1) @ states
    attended = attended * torch.linspace(0, 1, 7)[None, :, None] + F.scaled_dot_product_attention(
        states, states, states
    )
    scaled = (scores - scores.mean(1, keepdim=True)) / (wanted / wanted.abs().amax(1, keepdim=True)).std(1)[:, None]
    chosen = -scores.log_softmax(-1)[rows, p.classes] + scores.gather(1, p.several).sort(1).values[:, 0]
    return scaled.square().mean() + (chosen * rows.new_ones(())).mean() + attended.square().sum((1, 2)).mean()


def shown_beside(p: Part) -> Tensor:
    """Selects and reads by values for what is shown, not for the loss."""
    scores, right = p.scores, p.classes > 1
    p.net.shown = float((scores.argmax(1)[right] == p.classes[right]).float().mean()), right.nonzero().shape[0]
    p.net.shown += (len(torch.unique(p.classes)), sum(map(len, p.texts)))
    return 0.5 * (scores - p.wanted).square().mean()


def by_distribution(p: Part) -> Tensor:
    """Reads values to check them."""
    scores = p.scores
    chosen = torch.distributions.Categorical(logits=scores).log_prob(p.classes)
    return -(chosen * p.wanted[:, 0]).mean()


def read_perplexity(p: Part) -> Tensor:
    """Cannot run on all numbers that it may read."""
    loss = p.error.mean()
    p.net.shown = math.exp(loss.item())
    return loss


def written_by_mask(p: Part) -> Tensor:
    error = p.error
    error[p.wanted > 0.5] = 0
    return error.mean()


def two_views(p: Part) -> Tensor:
    both = p.net["x"](torch.cat([p.x, 2 * p.x]))
    one, two = both.chunk(2)
    return F.cosine_similarity(one, two).mean() + (both[: len(both) // 2] * both[len(both) // 2 :]).mean()


def steps_in_a_row(p: Part) -> Tensor:
    """Layers return [samples * steps, ...]."""
    rows = torch.stack([p.x, p.x**2], 1).flatten(0, 1)
    return p.net["x"](rows).square().mean()


def written(p: Part) -> Tensor:
    counts = p.wanted.clone()
    counts[:, 0] = 0
    return (p.error * counts).mean()


LABELS, OF_CLASSES = "mean over count(batch['labels'] != -100)", "mean over count(batch['classes'] != -100)"
NEXT = "mean over count(batch['labels'][:, 1:] != -100)"
MEAN, SUM = "mean over samples", "sum over samples"
KNOWN: dict[str, tuple[Step, list[str]]] = {
    "classes": (lambda p: F.cross_entropy(p.scores, p.classes), [OF_CLASSES]),
    "smoothed": (lambda p: F.cross_entropy(p.scores, p.classes, label_smoothing=0.1), [OF_CLASSES]),
    "columns": (
        lambda p: F.cross_entropy(p.scores, p.several[:, 1]),
        ["mean over count(batch['several'][:, 1] != -100)"],
    ),
    "classes summed": (lambda p: F.cross_entropy(p.scores, p.classes, torch.ones(CLASSES), reduction="sum"), [SUM]),
    "probabilities": (lambda p: F.cross_entropy(p.scores, p.wanted.softmax(-1)), [MEAN]),
    "computed labels": (lambda p: F.cross_entropy(p.scores, p.wanted.argmax(1)), [MEAN]),
    "tokens": (lambda p: F.cross_entropy(p.states.flatten(0, 1), p.labels.flatten()), [LABELS]),
    "tokens in a row": (lambda p: F.cross_entropy(p.states.transpose(1, 2), p.labels), [LABELS]),
    "next tokens": (lambda p: F.cross_entropy(p.states[:, :-1].flatten(0, 1), p.labels[:, 1:].flatten()), [NEXT]),
    "as transformers": (
        lambda p: F.cross_entropy(
            p.net["tokens"](p.tokens.view(-1, 7)).view(-1, TOKENS),
            F.pad(p.labels.view(-1, 7), (0, 1), value=-100)[..., 1:].contiguous().view(-1),
        ),
        [NEXT],
    ),
    "its own tokens": (
        lambda p: F.cross_entropy(p.states.flatten(0, 1), p.tokens.flatten(), ignore_index=0),
        ["mean over count(batch['tokens'] != 0)"],
    ),
    "squares": (lambda p: F.mse_loss(p.scores, p.wanted), [MEAN]),
    "logits": (lambda p: F.binary_cross_entropy_with_logits(p.scores, p.mask, p.mask), [MEAN]),
    "divergence": (lambda p: F.kl_div(p.scores.log_softmax(-1), p.wanted.softmax(-1), reduction="batchmean"), [MEAN]),
    "mean": (lambda p: p.error.mean(), [MEAN]),
    "sum": (lambda p: p.error.sum() / 100, [SUM]),
    "sum by samples": (lambda p: p.error.sum() / len(p.x), [MEAN]),
    "sum by a number of the batch": (lambda p: p.error.sum() / p.items, [SUM]),
    "mean of sums": (lambda p: p.error.sum(0).mean(), [SUM]),
    "sum of means": (lambda p: p.error.mean(0).sum(), [MEAN]),
    "masked": (lambda p: (p.error * p.mask).mean(), [MEAN]),
    "mean over a mask": (lambda p: (p.error * p.mask).sum() / p.mask.sum(), ["mean over sum(batch['mask'])"]),
    "mean over a mask, never empty": (
        lambda p: (p.error * p.mask).sum() / (p.mask.sum() + 1e-6),
        ["mean over (sum(batch['mask']) + 1e-06)"],
    ),
    "over a count, at least 1": (
        lambda p: p.error.sum() / p.mask.sum().clamp(min=1),
        ["mean over max(sum(batch['mask']), 1)"],
    ),
    "focal": (focal, [MEAN]),
    "several": (lambda p: 2 * p.error.mean() - 0.1 * F.cross_entropy(p.scores, p.classes), [MEAN, OF_CLASSES]),
    "stacked": (lambda p: torch.stack([p.error.mean()] * 2).mean(), [MEAN]),
    "in place": (added_in_place, [MEAN]),
    "penalty": (with_penalty, [MEAN]),
    "learned weight": (lambda p: p.error.mean() * p.net["x"][0].bias[0].exp() - p.net["x"][0].bias[0], [MEAN]),
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
    total = sum(
        w * float(step(Part(net, part)).detach()) for w, part in zip(weights.of(other, parts), parts, strict=True)
    )
    assert total == pytest.approx(float(step(Part(net, other)).detach()), rel=1e-5)


def by_item(p: Part) -> Tensor:
    return (p.error * p.mask).sum() / max(1, int(p.mask.sum()))


def by_branch(p: Part) -> Tensor:
    loss = p.error.mean()
    return loss + p.scores.mean() if bool(p.mask.any()) else loss


def divided_by(error: Tensor, mean: Tensor) -> Tensor:
    return (error / mean).mean()


def contrasted(p: Part) -> Tensor:
    features = p.scores
    return F.cross_entropy(features @ features.T, torch.arange(len(features)))


INFLUENCE = "samples of a batch influence one another"
BY_BATCH, IN_MEAN, IN_SUM = "`div` (test_losses.py:", "in `mean` (test_losses.py", "in `sum` (test_losses.py"
READ = "depends on values of the batch that are read"
UNKNOWN: dict[str, tuple[Step, str]] = {
    "clamped count": (lambda p: p.error.sum() / (p.mask > 0).sum().clamp(min=1), BY_BATCH),
    "items": (by_item, READ),
    "numpy": (lambda p: p.error.sum() / float(p.mask.numpy().sum()), READ),
    "list": (lambda p: p.error.sum() / sum(map(sum, p.mask.tolist())), READ),
    "branch": (by_branch, READ),
    "counted by numpy": (lambda p: p.error.sum() / max(1, int(numpy.count_nonzero(p.mask.numpy()))), READ),
    "counted in a list": (lambda p: p.error.sum() / max(1, sum(v != 0 for v in p.mask[:, 0].tolist())), READ),
    "where": (lambda p: p.error.sum() / max(1, torch.where(p.mask > 0)[0].numel()), READ),
    "rows": (lambda p: p.error.sum() / max(1, (p.mask > 0).nonzero().shape[0]), READ),
    "rows chosen": (lambda p: p.error.sum() / len(p.x[p.mask[:, 0] > 0]), READ),
    "kinds": (lambda p: p.error.sum() / torch.unique(p.mask).numel(), READ),
    "masked rows": (lambda p: p.error.sum() / max(1, p.mask.masked_select(p.mask > 2).numel()), READ),
    "texts": (lambda p: p.error.sum() / max(1, sum(len(t) > 11 for t in p.texts)), READ),
    "words": (lambda p: p.error.sum() / sum(len(t.split()) for t in p.texts), "is divided by a number that is neither"),
    "chosen": (lambda p: p.error[p.mask > 0].mean(), "values that `index`"),
    "selected": (lambda p: torch.masked_select(p.error, p.mask > 0).mean(), "values that `masked_select`"),
    "by numbers": (lambda p: p.error[p.mask[:, 0].nonzero()[:, 0]].mean(), "values that `nonzero`"),
    "class weights": (
        lambda p: F.cross_entropy(p.scores, p.classes, torch.ones(CLASSES)),
        "is a mean by class weights",
    ),
    "labels left out": (
        lambda p: F.cross_entropy(p.scores, p.classes.masked_fill(p.mask[:, 0] < 1, -100)),
        "computed by `masked_fill`",
    ),
    "exp": (lambda p: p.error.mean().exp(), "it goes through `exp`"),
    "root": (lambda p: p.error.mean().sqrt(), "it goes through `sqrt`"),
    "product": (lambda p: p.error.mean() * p.scores.mean(), "multiplies two values"),
    "largest": (lambda p: p.error.max(), "it goes through `max`"),
    "hardest": (lambda p: p.error.mean(1).topk(2).values.mean(), "it goes through `topk`"),
    "one sample": (lambda p: p.error.mean() + p.scores[0, 0], "some of the samples"),
    "mean and sum": (lambda p: p.error.mean() + p.error.sum(), "a mean and a sum"),
    "sum and penalty": (lambda p: p.error.sum() + p.net["x"][0].weight.square().sum(), "the same for each micro-batch"),
    "shares of classes": (
        lambda p: F.binary_cross_entropy_with_logits(
            p.scores, p.mask, pos_weight=(p.mask == 0).sum() / (p.mask == 1).sum()
        ),
        IN_SUM,
    ),
    "weights of mean 1": (
        lambda p: F.binary_cross_entropy_with_logits(p.scores, p.mask, p.mask / p.mask.mean()),
        IN_MEAN,
    ),
    "weighted by a mean": (lambda p: (p.error * p.mask / p.mask.mean()).mean(), IN_MEAN),
    "weighted by the largest": (lambda p: (p.error * p.mask / p.mask.max()).mean(), "in `max` (test_losses.py"),
    "by a share": (lambda p: (p.error / (p.mask > 0).float().mean().clamp(min=0.1)).mean(), IN_MEAN),
    "added inside": (lambda p: (p.error + (p.scores * p.mask).sum() / p.mask.sum()).mean(), IN_SUM),
    "by itself": (lambda p: divided_by(p.error, p.error.detach().mean()), INFLUENCE),
    "advantages": (lambda p: p.error.mean() + (p.scores * (p.wanted - p.wanted.mean())).mean(), IN_MEAN),
    "normalised": (lambda p: (p.error * (p.wanted - p.wanted.mean(0)) / p.wanted.std(0)).mean(), INFLUENCE),
    "read inside": (lambda p: (p.error * p.mask / float(p.mask.mean())).mean(), READ),
    "softmax of samples": (lambda p: (p.error.mean(1) * p.wanted.mean(1).softmax(0)).sum(), "in `_softmax`"),
    "running sum": (lambda p: (p.error * p.mask.cumsum(0)).sum(), "in `cumsum`"),
    "ranks": (lambda p: (p.error.mean(1).sort().values * 0.5).mean(), "in `sort`"),
    "neighbours": (lambda p: (p.scores[1:] - p.scores[:-1]).square().sum(), "in `slice`"),
    "contrasted": (contrasted, INFLUENCE),
    "others": (lambda p: (p.scores - p.wanted[p.x[:, 0].argsort()]).mean(), INFLUENCE),
    "pairs": (
        lambda p: (p.scores[:, None] - p.wanted[None]).square().mean(),
        "neither the same for all batches nor grows with the samples",
    ),
    "batch statistics": (lambda p: F.batch_norm(p.scores, None, None, training=True).square().mean(), "batch_norm"),
    "in a matrix": (lambda p: (p.wanted.T @ p.scores).square().mean(), "it goes through `pow`"),
    "window": (lambda p: torch.cat([p.error.mean(1)[:2].mean()[None]]).sum(), "`slice` (test_losses.py"),
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


def test_what_is_the_same_only_for_samples_that_are_alike_is_refused():
    """Until layers return something else, all samples are the same."""

    def varied(p: Part) -> Tensor:
        features = p.scores
        return (features - p.wanted).square().mean() + (features - features.mean(0)).square().mean()

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


def counted(p: Part) -> Tensor:
    """RetinaNet's way."""
    each = F.binary_cross_entropy_with_logits(p.scores, p.mask, reduction="none")
    return each.sum() / (p.mask > 0).sum().clamp(min=1)


def masked(p: Part) -> Tensor:
    return (p.error * p.mask).sum() / p.mask.sum()


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (counted, lambda part: (part["mask"] > 0).sum().clamp(min=1)),
        (masked, lambda part: float(part["mask"].sum())),
        (by_item, lambda part: max(1, int(part["mask"].sum()))),
        (lambda p: p.error.mean(), "samples"),
        (lambda p: p.error.sum(), "sum"),
    ],
)
def test_a_loss_weight_that_is_told(step, told):
    """Also for micro-batches that have nothing of what is counted."""
    weights, _ = look(step, loss_weight=told)
    net, other = model(), batch(empty=8)
    parts = balanced_parts(other, 3)
    losses = [float(step(Part(net, part)).detach()) for part in parts]
    total = sum(weight * loss for weight, loss in zip(weights.of(other, parts), losses, strict=True) if weight)
    assert total == pytest.approx(float(step(Part(net, other)).detach()), rel=1e-5)


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
        weights, seen = look(lambda p, factor=factor: tokens(p) * factor())
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
    def step(p: Part) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not watched"):
            return p.error.mean()

    with pytest.raises(PipelineError, match=r"cannot be followed \(RuntimeError: not watched\).*loss_weight='samples'"):
        look(step)
    assert look(step, loss_weight="samples")[1].examples
