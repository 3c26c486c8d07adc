"""CUDA graphs of the simulation: what is kept, what a replay does, and what a capture refuses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.simulated_cuda import ORDERS, simulated_cuda


def captured(work: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]:
    """Run it once and capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph, stream


@pytest.mark.parametrize("order", ORDERS)
def test_a_replay_computes_from_what_is_there_and_a_capture_does_not(order: str) -> None:
    x, total = torch.ones(4), torch.zeros(4)
    results: list[Tensor] = []

    def work() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            twice = x * 2
        torch.cuda.current_stream().wait_stream(side)
        total.add_(twice)
        results[:] = [total + torch.zeros(4).bernoulli_(0.5), twice]

    def warm() -> None:
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                x * 2

    with simulated_cuda(order) as device:
        warm()
        graph, _ = captured(work)
        assert total.tolist() == [2.0] * 4
        assert torch.isnan(results[0]).all()
        device.faults.clear()  # a new side stream in each run, whose first call is captured
        for step in (1, 2):
            x.fill_(step)
            seed = torch.manual_seed(step).get_state()
            graph.replay()
            assert total.tolist() == [2.0 + 2 * sum(range(1, step + 1))] * 4
            torch.default_generator.set_state(seed)
            assert torch.equal(results[0], total + torch.zeros(4).bernoulli_(0.5))
        torch.cuda.synchronize()
    assert device.faults == []


def left() -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ones(2).add_(1)


REFUSED = {
    "a value": (lambda: bool(torch.ones(1) > 0), "not permitted when stream is capturing"),
    "a wait of the host": (lambda: torch.cuda.synchronize(), "not permitted when stream is capturing: synchronize"),
    "a shape of values": (lambda: torch.ones(3).nonzero(), "not permitted when stream is capturing"),
    "an event": (lambda: torch.cuda.Event().query(), "not permitted when stream is capturing: Event.query"),
    "work from outside": (lambda: torch.cuda.current_stream().wait_event(EVENTS[0]), "uncaptured work"),
    "work that is left": (left, "unjoined work"),
}
EVENTS: list[torch.cuda.Event] = []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_in_a_capture_raises(name: str) -> None:
    work, error = REFUSED[name]
    with simulated_cuda("late"):
        EVENTS[:] = [torch.cuda.current_stream().record_event()]
        with (
            pytest.raises(RuntimeError, match=error),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()),
        ):
            work()
        assert torch.ones(2).sum().item() == 2


def test_faults_of_graphs_are_found() -> None:
    with simulated_cuda("late") as device:
        stream, graph, x = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.ones(3) + 1
        with torch.cuda.graph(graph, stream=stream):
            x.mul_(3)
        assert "first call of aten::mul_ on stream 1 is captured" in device.faults.pop()
        del x
        graph.replay()
        assert "uses memory that has been freed" in device.faults.pop()
        torch.cuda.synchronize()
    assert device.faults == []
