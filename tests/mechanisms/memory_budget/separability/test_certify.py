"""The separability certificate: which losses may be trained in parts, and by which weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.parts.combine import WeightsUnclearError, loss_weights
from retime.foundations.parts.split import split_batch
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.separability.probe import sketch
from support.memory_steps import (
    SEPARABLE,
    WORDS,
    Case,
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


@pytest.mark.parametrize("name", SEPARABLE)
def test_separable_steps_and_their_weights(name: str) -> None:
    make, weighting = SEPARABLE[name]
    case = make()

    certificate = certify(case.step, case.batch, case.model)

    assert str(certificate.weighting) == weighting, certificate
    assert certificate.error <= certificate.tolerance < 1e-5
    assert certificate.reason == ""


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

    assert certify(case.step, case.batch, case.model).notes == ("gradient hooks run once for each sub-batch: 0.weight",)


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


def test_cases_are_of_use_only_if_they_train() -> None:
    for make, _ in SEPARABLE.values():
        case: Case = make()
        output = case.step(case.batch)
        assert (output["loss"] if isinstance(output, dict) else output).requires_grad
