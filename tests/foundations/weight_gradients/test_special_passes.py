"""Passes that the deferral stays out of, and pieces of graph that it leaves whole: what happens there is autograd's."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retime.foundations.weight_gradients import WeightGradientDeferral
from retime.foundations.weight_gradients.cut import SAVES_OUTPUT, SEVERAL_OUTPUTS, USED_TWICE
from retime.foundations.weight_gradients.passes import USED_ELSEWHERE
from support.deferral_pairs import WIDTH, Around, Own, assert_same, pair, step

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's, in forward mode


def reasons(deferral: WeightGradientDeferral) -> set[str]:
    return set(deferral.split.buffered_layers) | set(deferral.split.layers_in_order)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_runs_again_inside_the_backward_pass(reentrant: bool) -> None:
    def use(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    plain, model, deferral = pair(lambda: Around(nn.Linear(WIDTH, WIDTH), use))
    assert_same(model, plain, deferral, steps=3)


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1]])
def test_function_transforms_see_the_model_as_it_is(transform: Any) -> None:
    plain, model, deferral = pair(lambda: Around(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x)))
    step(model, deferral)
    x = torch.randn(4, 8)
    assert torch.equal(transform(lambda x: model(x).sum())(x), transform(lambda x: plain(x).sum())(x))
    assert_same(model, plain, deferral)


def test_forward_mode_sees_the_model_as_it_is() -> None:
    plain, model, deferral = pair(lambda: Around(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x)))
    step(model, deferral)
    x, tangents = torch.randn(4, 8), []
    for one in (plain, model):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangents.append(torch.autograd.forward_ad.unpack_dual(one(dual)).tangent)
    assert torch.equal(*tangents)
    assert_same(model, plain, deferral)


def test_a_copy_of_the_model_is_plain() -> None:
    plain, model, deferral = pair(lambda: Around(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x)))
    step(model, deferral)
    twin = copy.deepcopy(model)
    before = deferral.split.passes.deferred_gradients, reasons(deferral)
    assert all(torch.equal(a, b) for a, b in zip(step(twin), step(plain), strict=True))  # type: ignore[arg-type]
    assert (deferral.split.passes.deferred_gradients, reasons(deferral)) == before


def test_an_input_that_is_read_twice_adds_up_in_one_place() -> None:
    def use(x: Tensor, weight: Tensor) -> Tensor:
        return x + 2 * x + x @ weight

    plain, model, deferral = pair(lambda: Around(Own(use), lambda layer, x: layer(x * 1.1) * 1.3))
    assert_same(model, plain, deferral, steps=3)
    assert USED_TWICE in reasons(deferral)


def test_of_several_outputs_some_get_no_gradient() -> None:
    def use(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight, x @ weight.t()

    plain, model, deferral = pair(lambda: Around(Own(use), lambda layer, x: layer(x)[1]))
    assert_same(model, plain, deferral, steps=3)
    assert SEVERAL_OUTPUTS in reasons(deferral)


def test_an_output_that_the_layers_own_backward_reads() -> None:
    _, model, deferral = pair(lambda: Around(Own(lambda x, weight: weight[:4].exp()), lambda layer, x: x * layer(x)))
    step(model, deferral)
    assert SAVES_OUTPUT in reasons(deferral)


def test_code_that_reads_a_weight_only_once_a_layer_is_frozen_is_seen() -> None:
    class Model(Around):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.first.weight.requires_grad else out + self.layer.weight.sum()  # type: ignore[operator]

    plain, model, deferral = pair(lambda: Model(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x)))
    for frozen in (False, True, True):
        for one in (plain, model):
            one.first.requires_grad_(not frozen)  # type: ignore[union-attr]
        assert_same(model, plain, deferral)
    assert USED_ELSEWHERE in reasons(deferral)
