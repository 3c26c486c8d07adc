"""A probe leaves no trace: parameters, buffers, attributes, gradients, hooks and random states are as they were."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from retime.foundations.preserve_state.stand_ins import ScratchModel
from retime.mechanisms.memory_budget.separability.certify import certify
from support.memory_steps import SEPARABLE, classifier, convolutional, images, language


def everything(model: nn.Module) -> dict[str, Any]:
    """What a training run goes on with, as values and identities."""
    seen: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [np.asarray(part) for part in np.random.get_state()[1:]],
    }
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        seen[name] = (id(tensor), tensor._version, tensor.detach().clone(), tensor.dtype, tensor.requires_grad)
        seen[f"{name}.grad"] = None if tensor.grad is None else (id(tensor.grad), tensor.grad.clone())
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | Tensor | None)}
        seen[f"{name}: attributes"] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in plain.items()}
        seen[f"{name}: containers"] = {k: list(v) for k, v in vars(module).items() if isinstance(v, list | dict)}
    return seen


def assert_same(before: Any, after: Any, where: str = "") -> None:
    assert type(before) is type(after), where
    if isinstance(before, Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, np.ndarray):
        assert (before == after).all(), where
    elif isinstance(before, dict):
        assert list(before) == list(after), where
        for key in before:
            assert_same(before[key], after[key], f"{where}{key} ")
    elif isinstance(before, list | tuple):
        assert len(before) == len(after), where
        for one, two in zip(before, after, strict=True):
            assert_same(one, two, where)
    elif isinstance(before, nn.Module) or callable(before):
        assert before is after, where
    else:
        assert before == after, where


@pytest.mark.parametrize("name", [*SEPARABLE, "BatchNorm", "fails"])
def test_certificates_are_right_and_nothing_is_left(name: str) -> None:
    torch.manual_seed(5)
    case = SEPARABLE[name][0]() if name in SEPARABLE else classifier(convolutional(nn.BatchNorm2d))
    model = case.model
    for parameter in list(model.parameters())[:2]:
        parameter.grad = torch.randn_like(parameter)
    before = everything(model)
    copies = [leaf.clone() for leaf in (case.batch.values() if isinstance(case.batch, dict) else case.batch)]

    if name == "fails":
        with pytest.raises(ZeroDivisionError):
            certify(lambda batch: case.step(batch) / (1 // 0), case.batch, model)
    else:
        certificate = certify(case.step, case.batch, model)
        if name in SEPARABLE:
            assert str(certificate.weighting) == SEPARABLE[name][1], certificate
            assert certificate.error <= certificate.tolerance < 1e-5
            assert certificate.reason == ""

    assert_same(before, everything(model))
    batch = case.batch.values() if isinstance(case.batch, dict) else case.batch
    assert all(torch.equal(one, two) for one, two in zip(copies, batch, strict=True))


class Logging(nn.Module):
    """Keeps metrics, sums, lists and the last loss, as modules of a training framework do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convolutional(nn.BatchNorm2d)
        self.accuracy = MulticlassAccuracy(num_classes=5)
        self.average = MeanMetric()
        self.losses: list[Tensor] = []
        self.by_name = {"steps": 0, "nested": [torch.zeros(())]}
        self.total = torch.zeros(())
        self.last: Tensor | None = None

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        guesses = self.net(batch[0])
        loss = F.cross_entropy(guesses, batch[1])
        self.accuracy.update(guesses, batch[1])
        self.average.update(loss.detach())
        self.losses.append(loss.detach())
        self.by_name["steps"] += 1
        self.by_name["nested"][0] += loss.detach()
        self.total += loss.detach()
        self.last = loss
        self.train(False)
        return loss


@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
def test_metrics_and_attributes_are_as_they_were() -> None:
    torch.manual_seed(0)
    model = Logging()
    model.step(images())
    model.train()
    values = (model.accuracy.compute(), model.average.compute(), model.total.clone(), model.losses[0].clone())
    identities = [id(value) for value in (model.losses, model.losses[0], model.by_name, model.total, model.last)]
    nested = model.by_name["nested"][0].clone()

    certify(model.step, images(), model)

    assert identities == [id(v) for v in (model.losses, model.losses[0], model.by_name, model.total, model.last)]
    model.accuracy._computed = model.average._computed = None
    after = (model.accuracy.compute(), model.average.compute(), model.total, model.losses[0])
    assert all(torch.equal(one, two) for one, two in zip(values, after, strict=True))
    assert (len(model.losses), model.by_name["steps"]) == (1, 1)
    assert torch.equal(model.by_name["nested"][0], nested)
    assert model.training
    assert model.net.training


def test_no_hook_of_the_backward_pass_on_the_originals_fires() -> None:
    case = classifier(convolutional())
    fired: list[str] = []
    for name, parameter in case.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))

    certify(case.step, case.batch, case.model)

    assert fired == []
    case.step(case.batch).backward()
    assert len(fired) == len(list(case.model.parameters()))


def test_a_penalty_on_parameters_held_outside_of_the_model_is_seen() -> None:
    torch.manual_seed(0)
    case = classifier(convolutional(), "sum")
    parameters = list(case.model.parameters())

    def step(batch: Any) -> Tensor:
        return case.step(batch) + 10 * sum(p.square().sum() for p in parameters)

    assert not certify(step, case.batch, case.model).separable
    assert all(p.grad is None for p in parameters)


def test_a_model_in_double_precision_and_back() -> None:
    model = Logging()
    before = {name: (id(value), value.dtype) for name, value in model.state_dict(keep_vars=True).items()}

    with ScratchModel(model, torch.float64) as scratch:
        assert all(p.dtype == torch.float64 for p in model.parameters())
        assert model.total.dtype == torch.float64
        with torch.no_grad():
            model.net[0].weight.zero_()
        assert list(scratch.changed()) == ["net.0.weight"]
        scratch.restart()
        assert scratch.changed() == {}
        assert model.net[0].weight.abs().sum() > 0

    after = {name: (id(value), value.dtype) for name, value in model.state_dict(keep_vars=True).items()}
    assert before == after


def test_tied_weights_stay_tied_in_the_copy() -> None:
    model = language("lstm").model

    with ScratchModel(model, torch.float64) as scratch:
        assert model.out.weight is model.embedding.weight
        assert model.core._flat_weights[0] is model.core.weight_ih_l0
        assert model.core.weight_ih_l0.dtype == torch.float64
        assert len(scratch.parameters()) == len(list(model.parameters()))
    assert model.core._flat_weights[0] is model.core.weight_ih_l0
    assert model.core.dropout == 0.3


def test_the_number_of_samples_that_a_probe_computes_on() -> None:
    case = classifier(convolutional())
    sizes: list[int] = []

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        if type(batch[0]) is Tensor:  # others have no values, and take no time
            sizes.append(len(batch[0]))
        return case.step(batch)

    certify(step, case.batch, case.model, samples=5)

    assert sizes[:5] == [5, 3, 2, 5 - 1, 1]
    assert max(sizes) == 5
    assert sizes[5:8] == [5, 3, 2]  # other samples
    assert sizes[8:] == [5, 3, 5]  # forward only, with the operations recorded; and with a larger loss
