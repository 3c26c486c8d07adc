"""The fused kernel without ``Optimizer.step``: the same bits, and not where step would do more."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from retime.foundations.lazy_updates import PartialOptimizer, optimizers
from retime.foundations.lazy_updates.optimizers import FusedAdam, is_the_same_here, raw_step

SHAPES = ((5, 7), (3,), (2, 2, 2))


@pytest.fixture
def grouping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often an optimizer's own step groups tensors."""
    calls: list[int] = []
    real: Any = Optimizer._group_tensors_by_device_and_dtype

    def counted(tensors: Any, with_indices: bool = False) -> Any:
        calls.append(len(tensors[0]))
        return real(tensors, with_indices)

    is_the_same_here()  # runs steps of its own
    monkeypatch.setattr(Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(counted))
    return calls


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def give_gradients(tensors: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def step_on(tensors: list[nn.Parameter], optimizer: Optimizer, number: int, *, windowed: bool = False) -> None:
    give_gradients(tensors, number)
    if windowed:
        window = PartialOptimizer(optimizer)
        with torch.no_grad():
            window.update(tensors[:2])
            window.update(tensors[2:])
    else:
        optimizer.step()


def with_state(tensors: list[nn.Parameter], optimizer: Optimizer) -> list[Tensor]:
    return [*tensors, *(value for tensor in tensors for value in optimizer.state[tensor].values())]


def train(make: Callable[[Any], Optimizer], dtype: torch.dtype = torch.float32, *, windowed: bool) -> list[Tensor]:
    tensors = parameters(dtype)
    optimizer = make(tensors)
    for number in range(4):
        step_on(tensors, optimizer, number, windowed=windowed)
    return with_state(tensors, optimizer)


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}, {"betas": (0.5, 0.9), "eps": 1e-3}])
def test_bits_are_those_of_step(
    kind: type[Adam], dtype: torch.dtype, options: dict[str, Any], grouping: list[int]
) -> None:
    def make(tensors: Any) -> Optimizer:
        return kind(tensors, lr=0.1, weight_decay=0.1, fused=True, **options)

    plain = train(make, dtype, windowed=False)
    grouping.clear()
    ours = train(make, dtype, windowed=True)
    assert all(map(torch.equal, plain, ours))
    assert grouping == [2, 1]  # the first step alone, which makes the state


def test_groups_have_hyper_parameters_of_their_own() -> None:
    def make(tensors: Any) -> Optimizer:
        return AdamW([{"params": tensors[:1], "lr": 0.5}, {"params": tensors[1:], "weight_decay": 0.3}], fused=True)

    assert all(map(torch.equal, train(make, windowed=False), train(make, windowed=True)))


class Mine(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Other(AdamW):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p),
        lambda p: AdamW(p, foreach=True),
        lambda p: AdamW(p, lr=torch.tensor(0.1), fused=True),
        lambda p: torch.optim.SGD(p, 0.1, fused=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: Mine(p, fused=True),
        lambda p: Other(p, fused=True),
    ],
)
def test_what_would_do_more_than_the_kernel_steps_itself(make: Callable[[Any], Optimizer]) -> None:
    optimizer = make(parameters())
    assert FusedAdam.of(optimizer, raw_step(optimizer), optimizer.param_groups[0]) is None


def test_torch_compile_wraps_methods_of_optimizers_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = Adam._init_group

    @functools.wraps(real)
    def wrapped(*arguments: Any) -> Any:
        return real(*arguments)

    monkeypatch.setattr(Adam, "_init_group", wrapped)
    optimizer = Adam(parameters(), fused=True)
    assert FusedAdam.of(optimizer, raw_step(optimizer), optimizer.param_groups[0]) is not None
    monkeypatch.setattr(Adam, "_init_group", lambda *arguments: real(*arguments))  # somebody else's
    assert FusedAdam.of(optimizer, raw_step(optimizer), optimizer.param_groups[0]) is None


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_a_scaler_is_left_to_step(name: str) -> None:
    optimizer = AdamW(parameters(), fused=True)
    setattr(optimizer, name, torch.ones(()))
    assert FusedAdam.of(optimizer, raw_step(optimizer), optimizer.param_groups[0]) is None


def test_other_tensors_than_the_first_are_left_to_step() -> None:
    mixed = [*parameters(), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = AdamW(mixed, fused=True)
    step_on(mixed, optimizer, 0)
    kernel = FusedAdam.of(optimizer, raw_step(optimizer), optimizer.param_groups[0])
    assert kernel is not None
    before = [tensor.detach().clone() for tensor in mixed]
    with torch.no_grad():
        assert not kernel.update(mixed)
    assert all(map(torch.equal, before, mixed))
    assert all(optimizer.state[tensor]["step"] == 1 for tensor in mixed)


def test_a_loaded_state_is_used() -> None:
    def trained(*, windowed: bool) -> list[Tensor]:
        tensors = parameters()
        optimizer = AdamW(tensors, fused=True)
        step_on(tensors, optimizer, 0)
        saved = optimizer.state_dict()
        step_on(tensors, optimizer, 1)
        optimizer.load_state_dict(saved)
        step_on(tensors, optimizer, 2, windowed=windowed)
        return with_state(tensors, optimizer)

    assert all(map(torch.equal, trained(windowed=False), trained(windowed=True)))


def test_a_torch_whose_step_does_something_else_steps_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    real = optimizers.foreach_add
    monkeypatch.setattr(optimizers, "foreach_add", lambda tensors, one: real(tensors, one + 1))
    is_the_same_here.cache_clear()
    try:
        optimizer = AdamW(parameters(), fused=True)
        assert FusedAdam.of(optimizer, raw_step(optimizer), optimizer.param_groups[0]) is None
    finally:
        is_the_same_here.cache_clear()
