"""Models without a list of layers, the threads of calls, optimizers for a rank's own layers, and ranks of pipelines."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime import DifferenceWarning, declare_per_parameter
from retime.mechanisms.pipeline import PipelineError, check_optimizer, sizes_of
from retime.mechanisms.pipeline.calls import HERE, SuspendedCall, Workers
from retime.mechanisms.pipeline.layers import call_chain, find_layers
from support.pipeline_models import made
from support.time_limits import limit_s


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
        return self.two(self.one(x).relu())


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.a = Pair(), Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


@declare_per_parameter
class Declared(Own):
    """The same, with a promise."""


def test_which_optimizers_may_have_a_ranks_own_layers() -> None:
    one, other = nn.Linear(1, 2), nn.Linear(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer(torch.optim.AdamW(one.parameters()), one)
        check_optimizer(Declared(one.parameters(), lr=0.1), one)
    with pytest.warns(DifferenceWarning, match=r"own layers only, and Own.step is not torch's own"):
        check_optimizer(Own(one.parameters(), lr=0.1), one)
    with pytest.raises(ValueError, match="LBFGS needs all parameters and gradients at once"):
        check_optimizer(torch.optim.LBFGS(one.parameters()), one)
    with pytest.raises(ValueError, match=r"2 parameters that the module does not know .* shape \(2, 1\)"):
        check_optimizer(torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1), one)


def test_sizes() -> None:
    assert sizes_of(4, "auto", "auto") == (4, 1)
    assert sizes_of(4, "auto", 2) == (2, 2)
    assert sizes_of(4, 2, "auto") == (2, 2)
    assert sizes_of(1, "auto", "auto") == (1, 1)
    with pytest.raises(ValueError, match=r"make 6 ranks, and there are 4"):
        sizes_of(4, 3, 2)
    with pytest.raises(ValueError, match=r"make 3 ranks, and there are 4"):
        sizes_of(4, 3, "auto")


def test_a_thread_that_is_at_its_task_when_all_are_stopped_ends_behind_it() -> None:
    workers, begun, may_end = Workers(), threading.Event(), threading.Event()
    serving: list[threading.Thread] = []

    def task() -> None:
        serving.append(threading.current_thread())
        begun.set()
        may_end.wait(limit_s(30))

    workers.run(task)
    assert begun.wait(limit_s(30))
    workers.stop()
    may_end.set()
    serving[0].join(limit_s(30))
    assert not serving[0].is_alive()
    begun.clear()
    workers.run(task)  # they may be used again
    assert begun.wait(limit_s(30))
    assert serving[1] is not serving[0]
    workers.stop()
    serving[1].join(limit_s(30))
    assert not serving[1].is_alive()


def test_a_call_that_is_closed_ends_though_a_finally_block_stops_again() -> None:
    workers, ended, serving = Workers(), threading.Event(), list[threading.Thread]()

    def stops_at_two_layers() -> None:
        call = HERE.call
        serving.append(threading.current_thread())
        try:
            call.stop("the first layer")
        finally:
            try:
                call.stop("the second layer, in what cleans up")
            finally:
                ended.set()

    call = SuspendedCall(stops_at_two_layers, workers, 0)
    assert call.resume() == "the first layer"
    call.close()
    assert ended.wait(limit_s(30))
    workers.stop()
    serving[0].join(limit_s(30))
    assert not serving[0].is_alive()
