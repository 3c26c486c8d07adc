"""The separability certificate: which losses may be trained in parts, by which weights, and which may not."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.parts.combine import NotSeparableError, WeightsUnclearError, loss_weights
from retime.foundations.parts.split import split_batch
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.separability.probe import sketch
from support.memory_steps import (
    CLASSES,
    SAMPLES,
    SEPARABLE,
    WORDS,
    classifier,
    contrastive,
    convolutional,
    images,
    language,
    tokens,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_any_number_of_samples_gives_the_same_verdict(samples: int) -> None:
    plain, ragged, related = classifier(convolutional()), language(), contrastive()

    classes = "mean over count(batch[1] != -100)"
    assert str(certify(plain.step, plain.batch, plain.model, samples=samples).weighting) == classes
    assert "labels" in str(certify(ragged.step, ragged.batch, ragged.model, samples=samples).weighting)
    assert not certify(related.step, related.batch, related.model, samples=samples).separable


def test_a_batch_of_whole_sequences_shows_what_a_ragged_one_counts() -> None:
    case = language(ragged=False)
    certificate = certify(case.step, case.batch, case.model)
    parts = split_batch(language().batch, 4)

    assert loss_weights(certificate, split_batch(case.batch, 4)) == pytest.approx([4 / 11, 4 / 11, 3 / 11])
    counts = [int((part["labels"] != -100).sum()) for part in parts]
    assert loss_weights(certificate, parts) == pytest.approx([count / sum(counts) for count in counts])


def test_terms_that_weigh_parts_differently_have_no_weights() -> None:
    case = language(ragged=False)

    def step(batch: dict[str, Tensor]) -> Tensor:
        output = case.step(batch)
        return output["loss"] + case.model.embedding(batch["ids"]).square().mean()

    certificate = certify(step, case.batch, case.model)

    assert certificate.separable
    with pytest.raises(WeightsUnclearError, match=r"count\(batch\['labels'\] != -100\) and a mean over samples"):
        loss_weights(certificate, split_batch(language().batch, 4))


def test_a_batch_without_what_was_counted_has_no_weights() -> None:
    case = classifier(convolutional())

    def step(batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(case.model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["flags"]).sum() / batch["flags"].sum() if "flags" in batch else losses.mean()

    batch = dict(zip("xy", case.batch, strict=True))
    certificate = certify(step, {**batch, "flags": torch.ones(11, dtype=torch.bool)}, case.model)

    with pytest.raises(WeightsUnclearError, match=r"batch\['flags'\], which the loss is a mean over, is not in this"):
        loss_weights(certificate, split_batch(batch, 4))
    among = certify(step, batch, case.model, among=certificate)
    assert "the loss is a mean over samples now, and was a mean over count(batch['flags'] == 1)" in among.reason


def test_raggedness_is_looked_for_in_the_whole_batch() -> None:
    case = language(ragged=False)
    case.batch["labels"][-1, 2:] = -100  # the first samples are whole

    certificate = certify(case.step, case.batch, case.model, samples=3)

    assert str(certificate.weighting) == "mean over count(batch['labels'] != -100)"


def test_half_precision_parameters_are_probed_in_float64() -> None:
    model = convolutional().bfloat16()
    x, y = images()

    certificate = certify(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (x.bfloat16(), y), model)

    assert certificate.separable
    assert certificate.tolerance < 1e-5
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_autocast_is_seen_through() -> None:
    case = classifier(convolutional())

    def step(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return case.step(batch)

    certificate = certify(step, case.batch, case.model)

    assert certificate.separable
    assert certificate.tolerance < 1e-5


@pytest.mark.parametrize(
    ("make", "noted"),
    [
        (lambda: classifier(convolutional()), False),
        (lambda: classifier(convolutional(nn.Identity, nn.Dropout(0.1))), True),
        (lambda: classifier(convolutional(nn.Identity, nn.Dropout(0.1)).eval()), False),
        (lambda: language("attention"), True),
        (lambda: SEPARABLE["noise"][0](), True),
    ],
)
def test_random_numbers_are_noted(make: Any, noted: bool) -> None:
    case = make()

    certificate = certify(case.step, case.batch, case.model)

    assert any("drawn anew for each sub-batch" in note for note in certificate.notes) == noted
    assert ("drawn anew" in str(certificate)) == noted


def test_gradient_hooks_are_noted() -> None:
    case = classifier(convolutional())
    case.model[0].weight.register_hook(lambda gradient: gradient * 2)

    certificate = certify(case.step, case.batch, case.model)

    assert certificate.separable
    assert certificate.notes == ("gradient hooks run once for each sub-batch: 0.weight",)


class _AddsLoss(torch.autograd.Function):
    """As models with auxiliary losses have it: the gradient of the second is 1, whatever the loss's is."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, auxiliary: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(())


@pytest.mark.parametrize("way", ["adds", "clamps", "auxiliary"])
def test_gradients_that_do_not_grow_with_the_loss_keep_a_batch_whole(way: str) -> None:
    case = classifier(convolutional())
    weight = case.model[0].weight
    hooks = {
        "adds": lambda gradient: gradient + 0.01 * weight.detach(),
        "clamps": lambda gradient: gradient.clamp(-5, 5),
    }
    if way in hooks:
        weight.register_hook(hooks[way])

    def step(batch: Any) -> Tensor:
        loss = case.step(batch)
        return loss if way in hooks else _AddsLoss.apply(loss, 0.01 * weight.square().sum())

    certificate = certify(step, case.batch, case.model)

    assert not certificate.separable
    assert re.search(r"the gradients of 0\.weight.* do not grow as the loss does", certificate.reason)


@pytest.mark.parametrize("by_data", [False, True])
def test_a_teacher_that_is_its_student_so_far_keeps_a_batch_whole(by_data: bool) -> None:
    student, x = nn.Linear(3, 2), torch.randn(8, 3)
    model = nn.ModuleList([student, copy.deepcopy(student).requires_grad_(False)])

    def step(batch: Tensor) -> Tensor:
        for new, old in zip(student.parameters(), model[1].parameters(), strict=True):
            mean = old.detach() * 0.9 + new.detach() * 0.1
            if by_data:
                old.data = mean
            else:
                old.copy_(mean)
        return (student(batch) - model[1](batch)).square().mean() + student(batch).square().mean()

    assert re.search(r"each forward pass changes 1\.(bias|weight)", certify(step, x, model).reason)


def test_lengths_of_texts_that_are_alike_so_far_keep_a_batch_whole() -> None:
    model, texts = nn.Linear(3, 1), ["abcd"] * 8
    certificate = certify(lambda b: model(b[0]).sum() / sum(map(len, b[1])), (torch.randn(8, 3), texts), model)
    assert "len() of a text" in certificate.reason


def test_a_term_beside_a_clamped_mean_counts_once() -> None:
    case = classifier(convolutional())
    flags = torch.ones(11)

    def step(batch: Any) -> Tensor:
        each = F.cross_entropy(case.model(batch[0]), batch[1], reduction="none")
        decay = sum(one.square().sum() for one in case.model.parameters())
        return (each * batch[2]).sum() / batch[2].sum().clamp(min=1) + 0.05 * decay

    batch = (*case.batch, flags)
    certificate = certify(step, batch, case.model)
    assert sum(loss_weights(certificate, split_batch(batch, 4))) == pytest.approx(1)
    for there in (0, 8):  # a part without any divides by 1
        with pytest.raises(WeightsUnclearError, match="more in parts than in the batch"):
            loss_weights(certificate, split_batch((*case.batch, (torch.arange(11) < there).float()), 4))


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=WORDS, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    batch = tokens()
    batch = {"input_ids": batch["ids"], "labels": batch["labels"], "attention_mask": (batch["labels"] >= 0).long()}
    batch["labels"][:, 1] = -100  # tells the labels from the mask
    batch["labels"][3:] = batch["labels"][3:].roll(1, 1)

    certificate = certify(lambda part: model(**part), batch, model)

    assert str(certificate.weighting) == "mean over count(batch['labels'][:, 1:] != -100)"


def test_scalars_beside_the_loss_are_understood() -> None:
    case = classifier(convolutional())

    def step(batch: Any) -> dict[str, Any]:
        guesses = case.model(batch[0])
        hits = (guesses.argmax(1) == batch[1]).sum()
        return {
            "loss": F.cross_entropy(guesses, batch[1]),
            "right": hits,
            "accuracy": hits / len(batch[1]),
            "largest": guesses.detach().max(),
        }

    outputs = certify(step, case.batch, case.model).outputs

    assert {place: str(weighting) for place, weighting in outputs.items()} == {
        "output['loss']": "mean over count(batch[1] != -100)",
        "output['right']": "sum over samples",
        "output['accuracy']": "mean over samples",
    }


def test_a_number_that_is_still_0_beside_a_summed_loss_is_no_sum() -> None:
    case = classifier(convolutional())

    def step(batch: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(case.model(batch[0]), batch[1], reduction="sum"), "beta": 0.0}

    assert str(certify(step, case.batch, case.model).outputs["output['beta']"]) == "mean over samples"


def test_a_hook_cuts_what_has_no_first_dimension() -> None:
    model = nn.Linear(4, 2)
    batch = {"by column": torch.randn(4, 9), "steps": torch.randn(3)}

    def split(batch: dict[str, Tensor], sub_batch: int) -> list[dict[str, Tensor]]:
        return [{**batch, "by column": part} for part in batch["by column"].split(sub_batch, dim=1)]

    certificate = certify(lambda b: model(b["by column"].T).square().mean(), batch, model, split=split)

    assert str(certificate.weighting) == "mean over samples"
    assert sorted(certificate.outputs) == ["output"]


def test_a_sketch_keeps_lengths_and_sums() -> None:
    one, two = torch.randn(700, 900), torch.randn(700, 900)

    assert sketch(one).numel() == 1024
    torch.testing.assert_close(sketch(one) + sketch(two), sketch(one.double() + two.double()), rtol=0, atol=1e-3)
    assert float(sketch(one).norm() / one.norm()) == pytest.approx(1, abs=0.15)
    assert float(sketch(one - two).norm()) > 0.5 * float((one - two).norm())
    assert torch.equal(sketch(one[:1]), one[:1].flatten().double())


def test_batch_norm_is_named() -> None:
    case = classifier(convolutional(nn.BatchNorm2d))

    certificate = certify(case.step, case.batch, case.model)

    assert not certificate.separable
    assert certificate.layers == ("1",)
    assert "BatchNorm in train mode takes its statistics over the whole batch: 1;" in certificate.reason
    assert "offload only, or choose batchnorm='ghost'" in certificate.reason
    with pytest.raises(NotSeparableError, match="BatchNorm"):
        loss_weights(certificate, split_batch(case.batch, 4))


def test_batch_norm_without_running_statistics_is_named_in_eval_mode_too() -> None:
    case = classifier(convolutional(lambda c: nn.BatchNorm2d(c, track_running_stats=False)).eval())

    assert certify(case.step, case.batch, case.model).layers == ("1",)


@pytest.mark.parametrize("track", [True, False])
def test_ghost_probes_what_is_beside_batch_norm(track: bool) -> None:
    model = convolutional(lambda c: nn.BatchNorm2d(c, track_running_stats=track))
    case = classifier(model, "sum")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    certificate = certify(case.step, case.batch, model, ghost=True)

    assert str(certificate.weighting) == "sum over samples"
    assert model[1].training
    assert (model[1].running_mean is not None) == track
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(model.state_dict()) == set(before)


def test_a_contrastive_loss_is_not_separable() -> None:
    case = contrastive()

    certificate = certify(case.step, case.batch, case.model)

    assert not certificate.separable
    assert certificate.error > 0.01
    assert "samples of a batch influence one another in `mm` (memory_steps.py:" in certificate.reason
    assert "weight" in certificate.layers


def test_hooks_that_wait_for_whole_gradients_keep_batches_whole() -> None:
    model = nn.Linear(3, 1)
    model.bias.register_post_accumulate_grad_hook(lambda _: None)
    certificate = certify(lambda batch: model(batch).mean(), torch.randn(8, 3), model)
    assert not certificate.separable
    assert "would run for each sub-batch: bias" in certificate.reason


@pytest.mark.parametrize("share", [1.0, 1e-4])
def test_a_small_contrastive_term_beside_a_large_loss_is_found(share: float) -> None:
    body, head = nn.Linear(16, 8), nn.Linear(16, 8)
    model = nn.ModuleList([body, head])
    related = contrastive()

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        one, two = (F.normalize(head(view), dim=1) for view in batch)
        return body(batch[0]).square().mean() + share * F.cross_entropy(one @ two.T * 5, torch.arange(len(one)))

    certificate = certify(step, related.batch, model)

    assert not certificate.separable
    assert certificate.layers[0].startswith("1."), certificate.layers


def test_a_mean_over_what_cannot_be_counted_asks_for_a_count() -> None:
    model = nn.Linear(16, CLASSES)
    importance = torch.linspace(0.1, 2, CLASSES)
    batch = (torch.randn(SAMPLES, 16), torch.randint(0, CLASSES, (SAMPLES,)))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], importance)  # divides by the sum of the targets' weights

    certificate = certify(step, batch, model)
    counted = certify(step, batch, model, loss_weight=lambda part: importance[part[1]].sum())

    assert "is a mean by class weights" in certificate.reason
    assert "give loss_weight(part)" in certificate.reason
    assert counted.separable
    parts = split_batch(batch, 4)
    expected = torch.stack([importance[part[1]].sum() for part in parts]) / importance[batch[1]].sum()
    torch.testing.assert_close(torch.tensor(loss_weights(counted, parts)), expected)


def test_a_wrong_count_is_refused() -> None:
    case = language()

    certificate = certify(case.step, case.batch, case.model, loss_weight=lambda part: len(part["ids"]))

    assert not certificate.separable
    assert certificate.reason


class Counting(nn.Module):
    """Keeps a count of its calls in a buffer, as schedules inside of a model do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


def test_a_buffer_that_each_forward_pass_changes_is_named() -> None:
    model = nn.Sequential(Counting())

    certificate = certify(lambda x: model(x).square().mean(), torch.randn(6, 16), model)

    assert not certificate.separable
    assert certificate.layers == ("0",)
    assert "each forward pass changes 0.calls" in certificate.reason
    assert model[0].calls == 0


class Remembering(nn.Module):
    """Carries its hidden state from call to call, as truncated backpropagation through time does."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 4, batch_first=True)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach()
        return out


def test_a_state_that_one_part_would_hand_to_the_next_is_found() -> None:
    model = Remembering()

    certificate = certify(lambda x: model(x).square().mean(), torch.randn(6, 5, 4), model)

    assert not certificate.separable
    assert "the step runs on 5 samples but not on" in certificate.reason
    assert model.hidden is None


def test_a_loss_without_value_certifies_nothing() -> None:
    model = nn.Linear(4, 1)

    assert not certify(lambda x: model(x).mean() * float("nan"), torch.randn(6, 4), model).separable


def test_a_step_that_draws_what_its_loss_is_a_mean_over_is_found() -> None:
    model = nn.Linear(16, CLASSES)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1].masked_fill(torch.rand(len(batch[0])) < 0.5, -100))

    certificate = certify(step, (torch.randn(SAMPLES, 16), torch.randint(0, CLASSES, (SAMPLES,))), model)

    assert not certificate.separable
    assert certificate.error > 1e-4


@pytest.mark.parametrize("most_change", [1.0, 3e-4], ids=["at once", "nearly converged"])
def test_power_iterations_that_go_on_from_part_to_part_are_found(most_change: float) -> None:
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8))
    change = 1.0
    while change > most_change:
        before = model.parametrizations.weight[0]._u.clone()
        model(torch.zeros(1, 16))
        change = float((model.parametrizations.weight[0]._u - before).abs().max())

    assert not certify(lambda x: model(x).sum(), torch.randn(6, 16), model).separable


@pytest.mark.parametrize("samples", [1, 9])
def test_a_probe_takes_two_to_eight_samples(samples: int) -> None:
    with pytest.raises(ValueError, match="2 or more and of at most 8"):
        certify(lambda x: x.sum(), torch.randn(4, 4), nn.Linear(4, 1), samples=samples)


def test_one_sample_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="no parts to compare"):
        certify(lambda x: x.sum(), torch.randn(1, 4), nn.Linear(4, 1))


def test_the_steps_own_errors_come_through() -> None:
    case = classifier(convolutional())

    with pytest.raises(ValueError, match="needs no gradient"):
        certify(lambda batch: case.step(batch).detach(), case.batch, case.model)
    with pytest.raises(ZeroDivisionError):
        certify(lambda _: 1 / 0, case.batch, case.model)
    with pytest.raises(ValueError, match="run the model once"):
        certify(case.step, case.batch, nn.LazyLinear(3))
