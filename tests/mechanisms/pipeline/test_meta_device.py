"""Models on the meta device: values when they are needed, the same ones for everybody."""

import pytest
import torch
from torch import nn

from retime.mechanisms.pipeline import DeferredInitModel, PipelineError, is_on_meta, load_into_meta

CPU = torch.device("cpu")


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, tensor):
        return tensor * self.weight


class Counted(Scale):
    def reset_parameters(self):
        nn.init.constant_(self.weight, 7.0)


class Custom(nn.Module):
    """Says for all inside of it how they begin, as many models do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), Scale())

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)


def made(*layers):
    with torch.device("meta"):
        return nn.Sequential(*(layer() for layer in layers))


def linear():
    return nn.Linear(3, 3)


def tied():
    model = made(linear, linear)
    model[1].weight = model[0].weight
    return model


def hollow_of(model, seed=0):
    return DeferredInitModel(model, CPU, seed)


def has_values(module):
    return not any(bool(parameter.isnan().any()) for parameter in module.parameters())


def test_an_optimizer_may_hold_parameters_that_have_no_values():
    model = made(linear, linear)
    assert is_on_meta(model)
    hollow = hollow_of(model)
    assert not is_on_meta(model)
    assert set(hollow.parameters) == set(model.parameters())
    assert all(parameter.untyped_storage().nbytes() == 4 for parameter in model.parameters())
    before = list(model.parameters())
    hollow.fill(model)
    assert has_values(model)
    assert list(model.parameters()) == before  # the same objects


def test_values_depend_on_names_and_seed_alone():
    whole, parts, other = (made(linear, linear, linear) for _ in range(3))
    random = torch.get_rng_state()
    hollow_of(whole).fill(whole)
    hollow = hollow_of(parts)
    with hollow.filled(parts[2]):
        assert torch.equal(parts[2].weight, whole[2].weight)
        assert not has_values(parts[0])
    assert not has_values(parts[2])
    for layer in reversed(parts):
        hollow.fill(layer)
    hollow_of(other, seed=1).fill(other)
    for one, two, three in zip(whole.parameters(), parts.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    assert not torch.equal(whole[0].weight, whole[1].weight)
    assert torch.equal(torch.get_rng_state(), random)


def test_memory_is_used_again_but_where_somebody_may_hold_it():
    model = made(linear, linear)
    hollow = hollow_of(model)
    with hollow.filled(model[0]):
        first = model[0].weight.data_ptr()
    with hollow.filled(model[1], again=False):
        assert model[1].weight.data_ptr() == first
        weight = model[1].weight.detach()
        values = weight.clone()
    hollow.fill(model[0])
    assert model[0].weight.data_ptr() != weight.data_ptr()
    assert torch.equal(weight, values)


def test_those_that_stay_are_kept():
    model = made(linear, linear)
    hollow = hollow_of(model)
    hollow.keep(list(model), {model[1].weight})
    assert has_values(model[1])
    assert not has_values(model[0])
    kept = model[1].weight.clone()
    with torch.no_grad():
        model[1].weight.add_(1)
    with hollow.filled(model[1]):
        pass
    assert torch.equal(model[1].weight, kept + 1)


def test_modules_say_how_they_begin():
    model = made(Counted, Custom, lambda: nn.BatchNorm1d(3), lambda: nn.MultiheadAttention(4, 2))
    assert model[2].running_mean.device.type == "meta"
    hollow_of(model).fill(model)
    assert model[0].weight.tolist() == [7.0] * 3
    assert model[1].inner[1].weight.tolist() != [1.0] * 3
    assert model[2].running_var.tolist() == [1.0] * 3
    assert model[2].weight.tolist() == [1.0] * 3
    assert has_values(model)


def test_frozen_and_tied_parameters_stay_so():
    model = tied()
    model[0].bias.requires_grad_(False)
    hollow = hollow_of(model)
    assert model[1].weight is model[0].weight
    assert not model[0].bias.requires_grad
    hollow.fill(model)
    first = model[0].weight.clone()
    alone = made(linear)
    hollow_of(alone).fill(alone)
    assert torch.equal(first, alone[0].weight)  # of the first that has it


def test_what_cannot_get_values_is_refused():
    model = tied()
    with pytest.raises(PipelineError, match="'1' has a weight of '0', and both are on the meta device"):
        hollow_of(model).fill_outside(list(model))
    model = made(linear, Scale)
    with pytest.raises(PipelineError, match=r"'1\.weight' is on the meta device, and nobody says how it begins"):
        hollow_of(model).fill(model)
    model = made(linear)
    model.register_buffer("table", torch.ones(3, device="meta"))
    with pytest.raises(PipelineError, match=r"buffers of '' \('table'\) are on the meta device"):
        hollow_of(model)


def test_values_of_a_checkpoint():
    values = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    values[1].weight = values[0].weight
    model = tied()
    model[1].bias.requires_grad_(False)
    load_into_meta(model, values.state_dict(), strict=True)
    assert not is_on_meta(model)
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, values[0].weight)
    assert not model[1].bias.requires_grad
    assert model[0].weight.requires_grad
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_into_meta(made(linear), values.state_dict(), strict=True)
