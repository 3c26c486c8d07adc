"""Pending updates, which whoever reads a parameter sees whole or not at all, and the fused kernel, without a step."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizer_module

from retime import declare_per_parameter, fuse_optimizer
from retime.foundations.lazy_updates import PartialOptimizer, PendingUpdate, is_pending, optimizers
from retime.foundations.lazy_updates.optimizers import FusedAdam, is_the_same_here, raw_step
from support.time_limits import limit_s

TIMEOUT_S = 20
LOOK_S = 0.3
"""For how long a reader that must wait is given the chance not to."""


class InTwoHalves(Optimizer):
    """Subtracts one; stops between the two halves of a parameter until it may go on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.stops = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                half = parameter.numel() // 2
                self.state[parameter]["half"] = True
                parameter[:half] -= 1
                self.stops.set()
                assert self.goes_on.wait(limit_s(TIMEOUT_S))
                parameter[half:] -= 1
                self.state[parameter]["half"] = False


declare_per_parameter(InTwoHalves)

READERS: dict[str, Callable[[nn.ParameterList, InTwoHalves, Any], Any]] = {
    "the parameter": lambda layers, optimizer, fusion: layers[0].detach().clone(),
    "a copy": lambda layers, optimizer, fusion: copy.deepcopy(layers[0]).detach(),
    "flush": lambda layers, optimizer, fusion: (fusion.flush(), layers[0].data.clone())[1],
    "the state": lambda layers, optimizer, fusion: torch.full((4,), float(optimizer.state[layers[0]]["half"])),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_thread_waits_for_an_update_that_another_runs(reader: str) -> None:
    layers = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
    optimizer = InTwoHalves(layers.parameters())
    fusion = fuse_optimizer(layers, optimizer, "forward", bucket_bytes=1)
    for parameter in layers:
        parameter.grad = torch.ones(4)
    optimizer.step()  # the first of a declared optimizer does not wait
    optimizer.step()
    assert all(map(is_pending, layers))
    optimizer.stops.clear()
    optimizer.goes_on.clear()
    first = threading.Thread(target=lambda: layers[0].sum())
    first.start()
    assert optimizer.stops.wait(limit_s(TIMEOUT_S))
    seen: list[torch.Tensor] = []
    second = threading.Thread(target=lambda: seen.append(READERS[reader](layers, optimizer, fusion)))
    second.start()
    second.join(LOOK_S)
    optimizer.goes_on.set()
    for thread in (first, second):
        thread.join(limit_s(TIMEOUT_S))
        assert not thread.is_alive()
    assert len(seen) == 1
    assert len(set(seen[0].tolist())) == 1, "half of an update was seen"
    assert torch.equal(seen[0], torch.full((4,), 0.0 if reader == "the state" else -1.0))


def test_threads_update_different_buckets_one_after_the_other() -> None:
    layers = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
    optimizer = InTwoHalves(layers.parameters())
    fuse_optimizer(layers, optimizer, "forward", bucket_bytes=1)
    for parameter in layers:
        parameter.grad = torch.ones(4)
    optimizer.step()  # the first of a declared optimizer does not wait
    optimizer.step()
    optimizer.goes_on.clear()
    threads = [threading.Thread(target=parameter.sum) for parameter in layers]
    for thread in threads:
        thread.start()
    threads[0].join(LOOK_S)
    optimizer.goes_on.set()
    for thread in threads:
        thread.join(limit_s(TIMEOUT_S))
    assert [parameter.tolist() for parameter in layers] == [[-1.0] * 4] * 2


def test_an_update_reads_and_copies_what_it_updates() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    seen: list[Any] = []

    def update() -> None:
        assert not pending.settle()
        with torch.no_grad():
            parameter.add_(1)
        seen.extend([parameter.sum(), copy.deepcopy(parameter)])

    pending = PendingUpdate([parameter], update)
    assert parameter.sum() == 4
    assert type(parameter) is nn.Parameter
    assert [type(one) for one in seen] == [torch.Tensor, nn.Parameter]
    assert torch.equal(seen[1], torch.ones(4))
    assert pending.settle()


def test_an_update_that_fails_leaves_a_plain_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(4))

    def update() -> None:
        raise RuntimeError("a rank is gone")

    PendingUpdate([parameter], update)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        parameter.sum()
    assert not is_pending(parameter)
    assert parameter.sum() == 0


def test_updates_take_multi_tensor_kernels_where_the_step_would() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    chosen: list[bool] = []

    def update() -> None:
        chosen.append(optimizer_module._default_to_fused_or_foreach([parameter], False, use_fused=True)[0])

    PendingUpdate([parameter], update).settle()
    assert chosen == [True]


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
