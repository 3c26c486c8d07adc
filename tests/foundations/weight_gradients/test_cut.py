"""A layer that is cut out of the graph: its memory, frozen parameters, other readers of them, other passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.weight_gradients import WeightGradientDeferral
from retime.foundations.weight_gradients.passes import USED_ELSEWHERE
from support.deferral_pairs import WIDTH, Around, Own, assert_same, pair, step


def in_place(layer: nn.Module, x: Tensor) -> Tensor:
    """Changes one output of the layer, whose memory another shares."""
    a, b = layer(x)
    b.mul_(2.0)
    return a + 0 * b.sum()


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: ((y := x @ w), y[:, 2:]),
        lambda x, w: ((y := x @ w), y.detach()),
        lambda x, w: (x + w.mean(0), x),
        lambda x, w: (x + w.mean(0), x.view(-1, WIDTH)),
    ],
    ids=["overlapping outputs", "detached output", "its input", "view of its input"],
)
def test_memory_that_outputs_share_is_changed_in_place(use: Any) -> None:
    plain, model, deferral = pair(lambda: Around(Own(use), in_place))
    assert_same(model, plain, deferral, steps=3)
    assert deferral.split.passes.deferred_gradients == 2


def test_an_output_that_backward_needs_must_not_be_changed_unseen() -> None:
    def attend(x: Tensor, weight: Tensor) -> Tensor:
        keys = torch.ones(1, 1, WIDTH, WIDTH)
        return nn.functional.scaled_dot_product_attention(x[None, None], weight[None, None], keys)[0, 0]

    plain, model, deferral = pair(lambda: Around(Own(attend), lambda layer, x: layer(x).mul_(2.0)))
    for attempt in (lambda: step(plain), lambda: step(model, deferral), lambda: step(model, deferral)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            attempt()


@pytest.mark.parametrize("layer", [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH)], ids=["cut", "held"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_parameters_are_frozen_and_thawed_in_mid_run(part: int, layer: Any) -> None:
    plain, model, deferral = pair(lambda: Around(layer(), lambda layer, x: layer(x)))
    for frozen in (False, False, True, True, False, False):
        for one in (plain, model):
            parameters = [*one.layer.parameters()] if part == 2 else [[*one.layer.parameters()][part]]
            for parameter in parameters:
                parameter.requires_grad_(not frozen)
        assert_same(model, plain, deferral)
    assert deferral.split.passes.deferred_gradients + deferral.split.passes.buffered_gradients > 6


def test_a_layer_frozen_between_forward_and_backward_gets_no_gradient() -> None:
    _, model, deferral = pair(lambda: Around(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x)))
    step(model, deferral)
    model.zero_grad()
    loss = model(torch.ones(4, 8)).sum()
    model.layer.requires_grad_(False)
    loss.backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True, False, False]


def test_a_branch_without_gradient_stays_without() -> None:
    fired = []

    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ignored, self.layer = nn.Linear(8, WIDTH), TwoInputs()
            self.first = nn.Linear(8, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.first(x), Zeros.apply(self.ignored(x)))

    class TwoInputs(Own):
        def __init__(self) -> None:
            super().__init__(lambda x, weight: x @ weight)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return super().forward(x)

    class Zeros(torch.autograd.Function):
        """Takes a gradient that is not there for zeros, as functions do unless they say otherwise."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            fired.append(gradient)
            return gradient

    plain, model, deferral = pair(Ignores)
    assert_same(model, plain, deferral, steps=3)
    assert not fired
    assert deferral.split.passes.deferred_gradients


def keeps_a_loss(module: Own) -> Callable[[Tensor, Tensor], Tensor]:
    def use(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        module.__dict__["kept"] = y.sin().mean()
        return y

    return use


def test_a_loss_that_a_layer_keeps_counts() -> None:
    def make() -> nn.Module:
        layer = Own(lambda x, weight: x)
        layer.use = keeps_a_loss(layer)
        return Around(layer, lambda layer, x: layer(x) + layer.kept)

    plain, model, deferral = pair(make)
    assert_same(model, plain, deferral, steps=3)
    assert deferral.split.layers_in_order == {USED_ELSEWHERE: 1}


@pytest.mark.parametrize("layer", [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH)], ids=["cut", "held"])
def test_a_weight_that_other_code_begins_to_read_is_refused_before_any_gradient(layer: Any) -> None:
    plain, model, deferral = pair(lambda: Around(layer(), lambda layer, x: layer(x)))
    assert_same(model, plain, deferral, steps=2)
    for one in (plain, model):
        one.use = lambda layer, x: layer(x) * layer.weight.mean()
    with pytest.raises(RuntimeError, match=r"'layer' get gradients from outside.*No gradient has been set.*use k=0"):
        step(model, deferral)
    assert all(parameter.grad is None for parameter in model.parameters())
    deferral.split.forget()
    assert_same(model, plain, deferral)


def test_double_backward_is_refused_before_any_gradient() -> None:
    square = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    model = Around(nn.Sequential(*square), lambda layer, x: layer(x))
    deferral = WeightGradientDeferral(model, k=2)
    step(model, deferral)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"use k=0.*No gradient has been set"):
        model(torch.ones(4, 8)).sum().backward(create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_that_move_to_other_memory_after_a_forward_pass_without_backward() -> None:
    plain, model, deferral = pair(lambda: Around(nn.LayerNorm(WIDTH), lambda layer, x: layer(x)))
    assert_same(model, plain, deferral)
    model(torch.ones(4, 8))  # its loss is never used
    for one in (plain, model):
        one.layer.weight.data = torch.full((WIDTH,), 3.0)
    assert_same(model, plain, deferral)
