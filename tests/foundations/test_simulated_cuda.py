"""The simulation of CUDA: when kernels run, what the host may see, the device's clock, and CUDA graphs."""

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.measure.timing import StepTimer
from retime.foundations.streams import has_streams
from support.simulated_cuda import ORDERS, SimulatedCuda, simulated_cuda
from support.simulated_streams import on_side, side


@pytest.fixture(params=ORDERS)
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedCuda]:
    with simulated_cuda(request.param) as simulated:
        yield simulated
    assert simulated.faults == []


def test_torch_is_as_it_was_afterwards() -> None:
    names = ("Stream", "Event", "stream", "current_stream", "synchronize")
    before = [getattr(torch.cuda, name) for name in names]
    own = set(vars(Tensor))
    with simulated_cuda():
        assert has_streams(torch.device("cpu"))
    assert [getattr(torch.cuda, name) for name in names] == before
    assert set(vars(Tensor)) == own
    assert not has_streams(torch.device("cpu"))
    assert has_streams(torch.device("cuda"))
    with pytest.raises(ValueError, match="order='never': give one of eager, late"), simulated_cuda("never"):
        pass


def test_late_kernels_run_when_somebody_waits() -> None:
    with simulated_cuda("late") as device:
        into = torch.zeros(2)
        with on_side() as stream:
            into.add_(1)
            total = into.sum()
        assert not stream.query()
        assert device.deferred == 2
        assert total.isnan()
        device.faults.clear()
        stream.synchronize()
        assert stream.query()
        assert (into.tolist(), total.item()) == ([1, 1], 2)


def test_what_depends_on_values_runs_at_once(device: SimulatedCuda) -> None:
    """Indices may come from bytes that are no values yet, numbers must not be drawn twice, sizes must be known."""
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    values = torch.arange(5.0)
    with on_side() as stream:
        again = torch.rand(3)
        place = (values * 1).argmax()
        last = values[place]
        positive = values[values > 2]
        assert positive.shape == (2,)
        assert last.item() == 4
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(drawn, again)


def test_temporaries_of_a_side_stream_are_freed_before_they_are_used(device: SimulatedCuda) -> None:
    """On one stream memory is used again in order."""
    values = torch.ones(4)
    with on_side() as stream:
        for _ in range(5):
            values = values * 2 + 1
    torch.cuda.current_stream().wait_stream(stream)
    assert values.tolist() == [63] * 4


def test_a_device_has_a_clock(device: SimulatedCuda) -> None:
    """A kernel takes a millisecond; streams run beside one another, and the host's launches take no time."""
    begin, half, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    stream, values, others = torch.cuda.Stream(), torch.zeros(4), torch.zeros(4)
    begin.record()
    stream.wait_event(begin)
    with torch.cuda.stream(stream):
        for _ in range(3):
            others.add_(1)
        half.record()
    values.add_(1).add_(1)
    torch.cuda.current_stream().wait_event(half)
    values.add_(others)
    end.record()
    end.synchronize()
    assert (begin.elapsed_time(half), begin.elapsed_time(end)) == (3, 4)
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        begin.elapsed_time(torch.cuda.Event())


def test_an_event_that_is_ahead_has_no_time_yet() -> None:
    with simulated_cuda("late"):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        values = torch.zeros(4)
        with on_side():
            begin.record()
            values.add_(1)
            end.record()
        with pytest.raises(RuntimeError, match="has not been reached"):
            begin.elapsed_time(end)


def test_a_thread_joins_the_simulation_with_a_stream(device: SimulatedCuda) -> None:
    into = torch.zeros(4)
    stream = side()

    def work() -> None:
        with torch.cuda.stream(stream):
            into.add_(1)

    before = device.kernels
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert device.kernels == before + 1
    torch.cuda.current_stream().wait_stream(stream)
    assert into.tolist() == [1] * 4


def test_a_future_orders_streams(device: SimulatedCuda) -> None:
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=["cpu"])
    into = torch.zeros(4)
    stream = side()
    after = done.then(lambda future: future.value().mul_(3))
    with torch.cuda.stream(stream):
        into.add_(1)
        done.set_result(into)
    assert after.wait().tolist() == [3] * 4


def test_pinned_memory_is_the_hosts(device: SimulatedCuda) -> None:
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned()
    assert not torch.empty(4).is_pinned()
    before = device.kernels
    pinned.fill_(2)
    assert (pinned + 1).sum() == 12
    assert device.kernels == before
    device.host_access(pinned, writes=True)


@pytest.mark.parametrize("order", ORDERS)
def test_a_steps_phases_are_timed_by_the_devices_clock(order: str) -> None:
    """Exactly: a kernel takes a millisecond, and the timer waits for nothing but its last event."""
    with simulated_cuda(order) as device:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        inputs = torch.ones(2, 4)
        timer = StepTimer("cpu", parameters=net.parameters())
        kernels = [device.kernels]
        timer.start()
        timer.switch("forward")
        loss = net(inputs).sum()
        kernels.append(device.kernels)
        timer.switch("backward")
        loss.backward()
        kernels.append(device.kernels)
        timer.switch("update")
        optimizer.step()
        kernels.append(device.kernels)
        timer.stop()
        timing = timer.timing()
    assert device.faults == []
    assert timing.clock == "cuda events"
    forward, backward, update = (float(after - before) for before, after in pairwise(kernels))
    assert (timing.forward_ms, timing.backward_ms, timing.update_ms) == (forward, backward, update)
    assert timing.step_ms == forward + backward + update
    assert 0 <= timing.communication_exposed_ms < backward  # behind the last gradient
    assert forward > 0
    assert backward > 0
    assert update > 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_replay_computes_from_what_is_there_and_a_capture_does_not(order: str) -> None:
    x, total = torch.ones(4), torch.zeros(4)
    results: list[Tensor] = []

    def work() -> None:
        with on_side() as other:
            twice = x * 2
        torch.cuda.current_stream().wait_stream(other)
        total.add_(twice)
        results[:] = [total + torch.zeros(4).bernoulli_(0.5), twice]

    with simulated_cuda(order) as device:
        with on_side() as stream:
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
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
    with on_side():
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
