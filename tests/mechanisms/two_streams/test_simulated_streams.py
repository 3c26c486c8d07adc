"""Two streams on a simulated CUDA device: plain weights in every order of kernels, no race; seeded faults are found."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from retime.mechanisms.two_streams import Setting, TwoStreamBackward
from retime.mechanisms.two_streams.regions import END, RegionProfile
from retime.mechanisms.two_streams.sub_stream import DeviceStream
from support.failing import FailsBackward
from support.simulated_cuda import ORDERS, simulated_cuda

STEPS = 4
DEVICE = torch.device("cuda")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 3)),
    )


def train(model: nn.Module, optimizer: Optimizer | None = None, steps: int = STEPS) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(3, 2, 8, 8, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained_on_two_streams(
    order: str, *, fuse: bool = False, **options: object
) -> tuple[list[Tensor], list[str], TwoStreamBackward]:
    model = network()
    with simulated_cuda(order) as device:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options |= {"optimizer": optimizer} if fuse else {}
        two_streams = TwoStreamBackward(model, threads=(1, 1), **options)  # type: ignore[arg-type]
        weights = train(model, optimizer)
        two_streams.remove()
        torch.cuda.synchronize()
        return weights, [str(fault) for fault in device.faults], two_streams


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"max_memory": 1000}], ids=["free", "bounded"])
@pytest.mark.parametrize("fuse", [False, True])
def test_weights_are_the_plain_ones_and_nothing_races(order: str, options: dict[str, object], fuse: bool) -> None:
    plain = train(network())
    weights, faults, two_streams = trained_on_two_streams(order, fuse=fuse, **options)
    assert faults == []
    assert all(torch.equal(one, other) for one, other in zip(plain, weights, strict=True))
    report = two_streams.report()
    assert (report.updates == 7 * (STEPS - 1)) if fuse else (report.sub_stream == 4 * (STEPS - 1))


@pytest.mark.parametrize("order", ORDERS)
def test_the_profile_of_regions_changes_no_bit(order: str) -> None:
    model, steps = network(), 2 + RegionProfile.STEPS
    with simulated_cuda(order) as device:
        two_streams = TwoStreamBackward(model)
        weights = train(model, steps=steps)
        tried = list(two_streams._search.times_ms)
        two_streams.remove()
        torch.cuda.synchronize()
        assert device.faults == []
    assert tried[:2] == [Setting(False), Setting(True)]
    backward = ["8", "6", "2", "0"]
    assert all(backward.index(name) < backward.index(later) for one in tried[2:] for name, later in one.places if later)
    assert all(torch.equal(one, other) for one, other in zip(train(network(), steps=steps), weights, strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"max_memory": 1000}], ids=["free", "bounded"])
def test_weight_gradients_that_wait_for_later_regions_change_no_bit(order: str, options: dict[str, Any]) -> None:
    model, places = network(), frozenset({("8", "2"), ("6", "2"), ("2", END)})
    with simulated_cuda(order) as device:
        two_streams = TwoStreamBackward(model, threads=(1, 1), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, steps=1)
        two_streams._use(Setting(True, places=places))
        weights = train(model, optimizer)
        report = two_streams.report()
        two_streams.remove()
        torch.cuda.synchronize()
        assert device.faults == []
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    train(plain, optimizer, steps=1)
    assert all(torch.equal(one, other) for one, other in zip(train(plain, optimizer), weights, strict=True))
    assert report.sub_stream == 4 * STEPS
    assert not options or report.held_bytes <= 1000


def test_few_bytes_wait_where_they_are_bounded() -> None:
    sizes = [trained_on_two_streams("late", **options)[2].report().held_bytes for options in ({}, {"max_memory": 1000})]
    assert sizes[1] <= 1000 < sizes[0]


class FailsElsewhere(FailsBackward):
    """Fails, and leaves another stream current than the one that it ran on, as autograd's thread does."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        return FailsBackward.backward(ctx, gradient)


@pytest.mark.parametrize("fuse", [False, True])
def test_what_a_failed_backward_pass_has_issued_is_waited_for(fuse: bool) -> None:
    model = network()
    with simulated_cuda("late") as device:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        two_streams = TwoStreamBackward(model, threads=(1, 1), optimizer=optimizer if fuse else None)
        train(model, optimizer, 2)
        given = FailsElsewhere.apply(model[:6](torch.ones(3, 2, 8, 8)))  # type: ignore[index, no-untyped-call]
        with pytest.raises(ArithmeticError, match="in the middle"):
            model[6:](given).sum().backward()  # type: ignore[index]
        torch.cuda.set_stream(torch.cuda.default_stream())
        with torch.no_grad():
            for written in (given, *model.parameters()):
                written.zero_()
        two_streams.remove()
        assert device.faults == []


def test_updates_of_layers_in_order_on_a_third_stream() -> None:
    model = network()
    with simulated_cuda("late") as device:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        two_streams = TwoStreamBackward(model, threads=(1, 1))
        two_streams.fusion = two_streams.fuse(optimizer, side_stream=True, bucket_bytes=1)
        two_streams.fusion.complete_in_step()
        train(model, optimizer)
        two_streams.remove()
        assert device.faults == []


def test_an_update_before_the_output_gradient_has_read_the_weight_is_found() -> None:
    faults: list[str] = []
    with patch.object(TwoStreamBackward, "_put_output_first", lambda two_streams: None):
        for order in ORDERS:
            faults += trained_on_two_streams(order, fuse=True)[1]
    assert faults


def _no_wait(stream: DeviceStream) -> None:
    stream._side._held.clear()


def _give(stream: DeviceStream, job: object, *, waits: bool, holds: bool) -> None:
    side = stream._side._get()
    assert side is not None
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    if holds:
        stream._side._held.append(job.compute)  # type: ignore[attr-defined]
    with torch.cuda.stream(side):
        job.run(on_sub_stream=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fault",
    [
        {"join": _no_wait},
        {"give": lambda stream, job: _give(stream, job, waits=False, holds=True)},
        {"give": lambda stream, job: _give(stream, job, waits=True, holds=False)},
    ],
    ids=["the main stream does not wait", "the sub-stream does not wait", "nothing is held"],
)
def test_a_seeded_fault_is_found(fault: dict[str, Callable[..., None]]) -> None:
    faults: list[str] = []
    for order in ORDERS:
        with ExitStack() as stack:
            for name, method in fault.items():
                stack.enter_context(patch.object(DeviceStream, name, method))
            faults += trained_on_two_streams(order)[1]
    assert faults
