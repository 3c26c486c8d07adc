"""The second thread of two streams on a CPU: what it raises, when it ends, and that nothing is left of it."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.mechanisms.two_streams import TwoStreamBackward
from retime.mechanisms.two_streams.layers import LinearKernels
from retime.mechanisms.two_streams.sub_stream import CoreStream, Job
from support.failing import FailsBackward
from support.time_limits import limit_s

NAME = "retime sub-stream"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def attached(threads: tuple[int, int] = (1, 1)) -> tuple[nn.Module, torch.optim.Optimizer, TwoStreamBackward]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), 0.1), TwoStreamBackward(model, threads=threads)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def sub_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def on_sub_thread() -> bool:
    return threading.current_thread().name == NAME


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    for thread in sub_threads():  # an earlier test's, whose owner was collected a moment ago
        thread.join(limit_s(20))
    threads = torch.get_num_threads()
    assert not sub_threads()
    yield
    assert not sub_threads()
    assert torch.get_num_threads() == threads


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Let both threads have a weight gradient in the backward pass, and something happen in the second one's."""

    def share(happens: Callable[[], None]) -> None:
        both_have_one, has_happened = threading.Barrier(2), threading.Event()
        met = threading.local()
        compute = LinearKernels.weight_gradients

        def weight_gradients(*args: Any) -> Any:
            if not has_happened.is_set() and not getattr(met, "yes", False) and sub_threads() and is_shared():
                met.yes = True
                both_have_one.wait(limit_s(60))
                if on_sub_thread():
                    has_happened.set()  # one time only; a barrier that is broken would fail who is late to leave it
                    happens()
            return compute(*args)

        monkeypatch.setattr(LinearKernels, "weight_gradients", weight_gradients)

    def is_shared() -> bool:
        return on_sub_thread() or joining.is_set()

    joining = threading.Event()
    join = CoreStream.join

    def noted_join(stream: CoreStream) -> None:
        joining.set()
        try:
            join(stream)
        finally:
            joining.clear()

    monkeypatch.setattr(CoreStream, "join", noted_join)
    return share


def trained(skip: int | None = None, steps: int = 5) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index, x in enumerate(inputs(steps)):
        if index != skip:
            step(model, optimizer, x)
    return list(model.parameters())


def assert_trained(model: nn.Module, expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))


def test_the_thread_has_its_number_of_kernel_threads_and_the_main_one_keeps_its_own() -> None:
    model, optimizer, two_streams = attached(threads=(2, 3))
    for x in inputs(2):
        step(model, optimizer, x)
    sub = two_streams._sub
    assert isinstance(sub, CoreStream)
    assert torch.get_num_threads() == 2
    assert [thread.daemon for thread in sub_threads()] == [True]
    counts = [0]
    sub.give(Job(lambda: counts.append(torch.get_num_threads()) or (), 0, "layer"))
    while len(counts) == 1:
        time.sleep(0.001)
    assert counts == [0, 3]
    two_streams.remove()
    two_streams.remove()


def test_what_the_thread_raises_comes_through_backward_with_the_layers_name(
    shared_out: Callable[[Callable[[], None]], None],
) -> None:
    def fail() -> None:
        raise ArithmeticError("on the second thread")

    model, optimizer, two_streams = attached()
    failed = []
    for index, x in enumerate(inputs(5)):
        if index == 2:
            shared_out(fail)
        try:
            step(model, optimizer, x)
        except ArithmeticError as error:
            failed.append(index)
            (note,) = error.__notes__
            assert note.startswith("retime: while the weight gradient of '")
    two_streams.remove()
    assert failed == [2]
    assert_trained(model, trained(skip=2))


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_the_main_thread_waits(shared_out: Callable[[Callable[[], None]], None]) -> None:
    main = threading.get_ident()
    model, optimizer, two_streams = attached()
    stopped = []
    for index, x in enumerate(inputs(5)):
        if index == 2:
            shared_out(lambda: signal.pthread_kill(main, signal.SIGINT))
        try:
            step(model, optimizer, x)
        except KeyboardInterrupt:
            stopped.append(index)
            assert not two_streams._waiting
    two_streams.remove()
    assert stopped == [2]
    assert_trained(model, trained(skip=2))


@pytest.mark.parametrize(("failing", "beside"), [(0, 14), (2, 12)])  # in step 0 two layers have their first gradient
def test_a_good_step_behind_a_failed_backward_pass(failing: int, beside: int) -> None:
    model, optimizer, two_streams = attached()
    for index, x in enumerate(inputs(5)):
        optimizer.zero_grad()
        y = model[2:](FailsBackward.apply(model[:2](x)) if index == failing else model[:2](x))  # type: ignore[index]
        if index == failing:
            with pytest.raises(ArithmeticError, match="in the middle"):
                y.square().mean().backward()
            continue
        y.square().mean().backward()
        optimizer.step()
    report = two_streams.report()
    two_streams.remove()
    assert_trained(model, trained(skip=failing))
    assert report.sub_stream + report.main_stream == beside
    assert report.in_order == {}
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_removed_between_a_failed_pass_and_the_next() -> None:
    model, optimizer, two_streams = attached()
    for x in inputs(2):
        step(model, optimizer, x)
    with pytest.raises(ArithmeticError):
        model[2:](FailsBackward.apply(model[:2](x))).square().mean().backward()  # type: ignore[index]
    two_streams.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forked_process_trains_on_by_itself() -> None:
    model, optimizer, two_streams = attached()
    data = inputs(5)
    for x in data[:3]:
        step(model, optimizer, x)
    expected = trained()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for x in data[3:]:
                step(model, optimizer, x)
            assert_trained(model, expected)
            assert [thread.name for thread in threading.enumerate()].count(NAME) == 1
            two_streams.remove()
            assert not sub_threads()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for x in data[3:]:
        step(model, optimizer, x)
    two_streams.remove()
    assert_trained(model, expected)


def test_the_thread_ends_with_its_owner() -> None:
    model, optimizer, two_streams = attached()
    for x in inputs(3):
        step(model, optimizer, x)
    (thread,) = sub_threads()
    del two_streams, model, optimizer
    gc.collect()
    thread.join(limit_s(60))
    assert not thread.is_alive()
