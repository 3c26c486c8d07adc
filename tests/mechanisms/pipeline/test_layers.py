"""Models without a list of layers are cut between the modules that a step calls."""

import pytest
import torch
from torch import Tensor, nn

from retime.mechanisms.pipeline import PipelineError
from retime.mechanisms.pipeline.layers import call_chain, find_layers
from support.pipeline_models import made


def names(model: nn.Module, ranks: int, *given: Tensor) -> list[str]:
    assert find_layers(model, "auto", ranks) is None
    chain = call_chain(model, lambda: model(*given), ranks)
    assert [model.get_submodule(name) for name in chain.names] == chain.modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return chain.names


def test_in_the_order_of_calls_and_apart_where_one_is_too_large() -> None:
    model, _, batch = made("attributes")
    inner = ["body.fc1", "body.fc2", "body.norm", "body.fc3"]
    assert names(model, 2, batch[0]) == ["embed", *inner, "last"]


@pytest.mark.parametrize("name", ["two_heads", "second_head_first"])
def test_what_the_loss_does_not_use_is_no_layer(name: str) -> None:
    model, step, batch = made(name)
    assert call_chain(model, lambda: step(batch), 2).names == ["embed", "body", "head"]


def test_what_fits_a_rank_stays_whole() -> None:
    model = Pairs()
    assert names(model, 2, torch.ones(1, 4)) == ["a", "b"]
    assert names(model, 4, torch.ones(1, 4)) == ["a.one", "a.two", "b.one", "b.two"]
    with pytest.raises(PipelineError, match="does not call 5 modules or more"):
        call_chain(model, lambda: model(torch.ones(1, 4)), 5)


def test_training_and_evaluation_call_the_same() -> None:
    model = Pairs()
    model.b.evaluates_apart = True  # as TransformerEncoderLayer does, which then calls none of its modules
    with pytest.raises(PipelineError, match=r"does: 'a.one', 'a.two', 'b'\)"):
        call_chain(model, lambda: model(torch.ones(1, 4)), 4)
    assert all(module.training for module in model.modules())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.evaluates_apart = False

    def forward(self, x: Tensor) -> Tensor:
        if self.evaluates_apart and not self.training:
            return x @ self.one.weight @ self.two.weight
        out: Tensor = self.two(self.one(x).relu())
        return out


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.a = Pair(), Pair()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out
