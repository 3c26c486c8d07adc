"""Pending updates and several threads: whoever reads a parameter sees the update before it, or all of it."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from retime import declare_per_parameter, fuse_optimizer
from retime.foundations.lazy_updates import PendingUpdate, is_pending
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
