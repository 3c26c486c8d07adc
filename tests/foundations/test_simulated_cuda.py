"""Programs with streams, each right and with one fault seeded: the simulation finds all faults, and nothing else.

A fault is found if it is listed or if numbers come out wrong, in one order of execution or more. Right programs pass in
all orders.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.measure.step_timer import StepTimer
from retime.foundations.streams import Mark, SideStream, has_streams
from support.simulated_cuda import ORDERS, SimulatedCuda, simulated_cuda

Program = Callable[[bool], bool]
PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    """Register a program: given whether it is to be right, it returns whether its numbers came out right."""
    PROGRAMS.append(function)
    return function


def run(function: Program, order: str, right: bool) -> tuple[bool, list[str]]:
    with simulated_cuda(order) as device:
        numbers = function(right)
    return numbers, device.faults


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_a_right_program_is_right_in_every_order(function: Program, order: str) -> None:
    assert run(function, order, right=True) == (True, [])


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_a_seeded_fault_is_found(function: Program) -> None:
    seen = [run(function, order, right=False) for order in ORDERS]
    assert any(faults or not numbers for numbers, faults in seen)


def test_there_are_enough_of_them() -> None:
    assert len(PROGRAMS) >= 20


def side() -> "torch.cuda.Stream":
    """A stream behind what the current one has been given."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


# Kernels on two streams.


@program
def nobody_waits_for_the_side_stream(right: bool) -> bool:
    source, into = torch.arange(4.0), torch.zeros(4)
    stream = side()
    with torch.cuda.stream(stream):
        into.copy_(source)
    if right:
        torch.cuda.current_stream().wait_stream(stream)
    return (into + 1).tolist() == [1, 2, 3, 4]


@program
def the_side_stream_does_not_wait_first(right: bool) -> bool:
    source, into = torch.zeros(4), torch.zeros(4)
    stream = side()
    source.add_(1)
    if right:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        into.copy_(source)
    torch.cuda.current_stream().wait_stream(stream)
    return into.tolist() == [1] * 4


@program
def what_the_side_stream_reads_is_overwritten(right: bool) -> bool:
    source, into = torch.ones(4), torch.zeros(4)
    stream = side()
    with torch.cuda.stream(stream):
        into.add_(source)
    if right:
        torch.cuda.current_stream().wait_stream(stream)
    source.zero_()
    torch.cuda.current_stream().wait_stream(stream)
    return into.tolist() == [1] * 4


@program
def two_side_streams_write_the_same(right: bool) -> bool:
    total = torch.zeros(4)
    one, two = side(), side()
    with torch.cuda.stream(one):
        total.add_(1)
    if right:
        two.wait_stream(one)
    with torch.cuda.stream(two):
        total.mul_(3)
    for stream in (one, two):
        torch.cuda.current_stream().wait_stream(stream)
    return total.tolist() == [3] * 4


@program
def an_event_is_recorded_before_the_work(right: bool) -> bool:
    into = torch.zeros(4)
    stream, event = side(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        if not right:
            event.record()
        into.add_(1)
        if right:
            event.record()
    event.wait()
    return (into * 2).tolist() == [2] * 4


@program
def an_event_is_waited_for_that_nobody_recorded(right: bool) -> bool:
    into = torch.zeros(4)
    stream, event = side(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        into.add_(1)
    if right:
        stream.record_event(event)
    torch.cuda.current_stream().wait_event(event)
    return (into * 2).tolist() == [2] * 4


@program
def an_event_is_recorded_on_the_wrong_stream(right: bool) -> bool:
    into = torch.zeros(4)
    stream = side()
    with torch.cuda.stream(stream):
        into.add_(1)
        inside = torch.cuda.current_stream().record_event()
    outside = torch.cuda.current_stream().record_event()
    torch.cuda.current_stream().wait_event(inside if right else outside)
    return (into * 2).tolist() == [2] * 4


@program
def one_event_stands_for_two_kernels(right: bool) -> bool:
    """Recording it again moves it, but who has waited by then has waited for the earlier kernel."""
    first, second = torch.zeros(4), torch.zeros(4)
    stream, event = side(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        first.add_(1)
        event.record()
    event.wait()
    with torch.cuda.stream(stream):
        second.add_(2)
        event.record()
    if right:
        event.wait()
    return (first + second).tolist() == [3] * 4


@program
def a_stream_waits_before_the_work_is_given(right: bool) -> bool:
    into = torch.zeros(4)
    stream = side()
    if not right:
        torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.stream(stream):
        into.add_(1)
    if right:
        torch.cuda.current_stream().wait_stream(stream)
    return (into * 2).tolist() == [2] * 4


@program
def the_wrong_stream_waits(right: bool) -> bool:
    into = torch.zeros(4)
    stream, other = side(), side()
    with torch.cuda.stream(stream):
        into.add_(1)
        event = stream.record_event()
    (torch.cuda.current_stream() if right else other).wait_event(event)
    return (into * 2).tolist() == [2] * 4


@program
def another_threads_stream_waits(right: bool) -> bool:
    """The current stream of a thread is its own."""
    into, user = torch.zeros(4), torch.cuda.Stream()
    stream = side()
    with torch.cuda.stream(stream):
        into.add_(1)
        event = stream.record_event()

    def wait() -> None:
        event.wait(user if right else None)

    with torch.cuda.stream(user):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        doubled = into * 2
    torch.cuda.current_stream().wait_stream(user)
    return doubled.tolist() == [2] * 4


@program
def a_wait_is_skipped_where_query_says_done(right: bool) -> bool:
    into = torch.zeros(4)
    stream = side()
    with torch.cuda.stream(stream):
        into.add_(1)
        event = stream.record_event()
    if right or not event.query():
        event.wait()
    return (into * 2).tolist() == [2] * 4


@program
def priority_is_taken_for_order(right: bool) -> bool:
    into = torch.zeros(4)
    stream = torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        into.add_(1)
    if right:
        torch.cuda.current_stream().wait_stream(stream)
    return (into * 2).tolist() == [2] * 4


@program
def a_chain_of_three_streams_misses_its_middle(right: bool) -> bool:
    values = torch.ones(4)
    first, second = side(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        values.add_(1)
        between = first.record_event()
    if right:
        second.wait_event(between)
    with torch.cuda.stream(second):
        after = second.record_event()
    torch.cuda.current_stream().wait_event(after)
    return (values * 2).tolist() == [4] * 4


@program
def a_new_tensor_of_the_side_stream_is_read_at_once(right: bool) -> bool:
    values = torch.arange(4.0)
    stream = side()
    with torch.cuda.stream(stream):
        total = values.exp().log().sum()
    if right:
        torch.cuda.current_stream().wait_stream(stream)
    return abs((total + 1).item() - 7) < 0.01


# Memory that is used again.


@program
def a_source_is_freed_before_it_was_read(right: bool) -> bool:
    source, into = torch.ones(4), torch.zeros(4)
    stream = side()
    with torch.cuda.stream(stream):
        into.copy_(source, non_blocking=True)
    if right:
        torch.cuda.current_stream().wait_stream(stream)
    del source
    torch.zeros(4)
    torch.cuda.current_stream().wait_stream(stream)
    return into.tolist() == [1] * 4


@program
def a_target_is_freed_before_it_was_written(right: bool) -> bool:
    """Whoever gets the memory next is written over."""
    source, into = torch.ones(4), torch.zeros(4)
    stream = side()
    with torch.cuda.stream(stream):
        into.copy_(source, non_blocking=True)
    if right:
        into.record_stream(stream)
    del into
    torch.zeros(4)
    torch.cuda.current_stream().wait_stream(stream)
    return True


@program
def a_stream_is_recorded_but_not_the_one_that_reads(right: bool) -> bool:
    source, into = torch.ones(4), torch.zeros(4)
    stream, other = side(), side()
    with torch.cuda.stream(stream):
        into.copy_(source, non_blocking=True)
    source.record_stream(stream if right else other)
    del source
    torch.zeros(4)
    torch.cuda.current_stream().wait_stream(stream)
    return into.tolist() == [1] * 4


@program
def a_tensor_of_the_side_stream_is_freed_while_the_default_stream_reads_it(right: bool) -> bool:
    """Its memory belongs to the stream on which it was allocated, which need not wait for the reader."""
    stream = side()
    with torch.cuda.stream(stream):
        made = torch.ones(4)
    torch.cuda.current_stream().wait_stream(stream)
    doubled = made * 2
    if right:
        made.record_stream(torch.cuda.current_stream())
    del made
    with torch.cuda.stream(stream):
        torch.zeros(4)
    return doubled.tolist() == [2] * 4


@program
def what_an_event_holds_is_let_go_of_when_it_is_recorded(right: bool) -> bool:
    """Tensors are held until the event was waited for, in the place of ``record_stream``."""
    gradient, total = torch.ones(4), torch.zeros(4)
    stream = side()
    with torch.cuda.stream(stream):
        total.add_(gradient)
    held, event = [gradient], stream.record_event()
    del gradient
    if not right:
        held.clear()
    torch.zeros(4)
    event.wait()
    held.clear()
    torch.zeros(4)
    return total.tolist() == [1] * 4


# Pinned memory and the host.


@program
def the_host_reads_before_the_copy_has_come(right: bool) -> bool:
    source, pinned = torch.ones(()), torch.zeros((), pin_memory=True)
    pinned.copy_(source, non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    return pinned.item() == 1


@program
def a_blocking_copy_is_taken_for_the_other_kind(right: bool) -> bool:
    source, pinned = torch.ones(4), torch.zeros(4, pin_memory=True)
    stream = side()
    with torch.cuda.stream(stream):
        pinned.copy_(source, non_blocking=not right)
    return pinned.tolist() == [1] * 4


@program
def the_host_waits_for_the_wrong_stream(right: bool) -> bool:
    source, pinned = torch.ones(4), torch.zeros(4, pin_memory=True)
    stream = side()
    with torch.cuda.stream(stream):
        pinned.copy_(source, non_blocking=True)
    (stream if right else torch.cuda.current_stream()).synchronize()
    return pinned.tolist() == [1] * 4


@program
def the_host_writes_what_is_being_copied_to_the_device(right: bool) -> bool:
    into, pinned = torch.zeros(4), torch.ones(4).pin_memory()
    stream = side()
    with torch.cuda.stream(stream):
        into.copy_(pinned, non_blocking=True)
        event = stream.record_event()
    if right:
        event.synchronize()
    pinned.zero_()
    torch.cuda.synchronize()
    return into.tolist() == [1] * 4


@program
def a_pinned_buffer_is_filled_again_while_it_is_still_filled(right: bool) -> bool:
    one, two, pinned = torch.ones(4), torch.full((4,), 2.0), torch.empty(4, pin_memory=True)
    first, second = side(), side()
    with torch.cuda.stream(first):
        pinned.copy_(one, non_blocking=True)
    if right:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        pinned.copy_(two, non_blocking=True)
    torch.cuda.synchronize()
    return pinned.tolist() == [2] * 4


@program
def a_buffer_comes_back_on_another_stream_before_it_has_arrived(right: bool) -> bool:
    source, into, pinned = torch.ones(4), torch.zeros(4), torch.empty(4, pin_memory=True)
    out, back = side(), side()
    with torch.cuda.stream(out):
        pinned.copy_(source, non_blocking=True)
        event = out.record_event()
    if right:
        back.wait_event(event)
    with torch.cuda.stream(back):
        into.copy_(pinned, non_blocking=True)
    torch.cuda.current_stream().wait_stream(back)
    return into.tolist() == [1] * 4


# Two streams in the backward pass: output gradients on the main stream, weight gradients beside them.


@program
def a_weight_gradient_is_cleared_while_it_is_added_up(right: bool) -> bool:
    layer_input, output_gradient, weight_gradient = torch.ones(2, 3), torch.ones(2, 4), torch.zeros(4, 3)
    stream = torch.cuda.Stream(priority=0)
    ready = torch.cuda.current_stream().record_event()
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        weight_gradient.addmm_(output_gradient.T, layer_input)
        done = stream.record_event()
    if right:
        done.wait()
    weight_gradient.mul_(0.5)
    torch.cuda.current_stream().wait_event(done)
    return bool((weight_gradient == 1).all())


@program
def an_output_gradient_is_changed_in_place_for_the_next_layer(right: bool) -> bool:
    layer_input, output_gradient = torch.ones(2, 3), torch.ones(2, 4)
    stream = side()
    with torch.cuda.stream(stream):
        weight_gradient = output_gradient.T @ layer_input
    if right:
        output_gradient = output_gradient * 0
    else:
        output_gradient.mul_(0)
    torch.cuda.current_stream().wait_stream(stream)
    return bool((weight_gradient == 2).all())


# Our own.


@program
def a_copys_mark_is_not_waited_for(right: bool) -> bool:
    source, into = torch.arange(4.0), torch.zeros(4)
    mark = SideStream("cuda").copy(into, source, hold=[source])
    if right:
        mark.wait()
    return (into + 1).tolist() == [1, 2, 3, 4]


@program
def a_mark_is_waited_for_by_a_thread_with_a_stream_of_its_own(right: bool) -> bool:
    """The stream on which the copy was given waits too, or else the caller's."""
    source, into = torch.arange(4.0), torch.zeros(4)
    mark = SideStream("cuda").copy(into, source, hold=[source])

    def wait() -> None:
        if right:
            mark.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    return (into + 1).tolist() == [1, 2, 3, 4]


@program
def a_copy_holds_nothing(right: bool) -> bool:
    source, into = torch.ones(4), torch.zeros(4)
    mark = SideStream("cuda").copy(into, source, hold=[source] if right else [])
    del source
    torch.zeros(4)
    mark.wait()
    return into.tolist() == [1] * 4


@program
def a_side_stream_runs_behind_itself_only(right: bool) -> bool:
    stream, total = SideStream("cuda"), torch.zeros(4)
    total.add_(1)
    with stream.after_current() if right else stream.after_itself():
        total.mul_(2)
    stream.join()
    return total.tolist() == [2] * 4


@program
def a_side_stream_is_not_joined(right: bool) -> bool:
    stream, total = SideStream("cuda"), torch.zeros(4)
    with stream.after_current():
        total.add_(1)
    if right:
        stream.join()
    return (total + 1).tolist() == [2] * 4


# The simulation itself.


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
        stream, into = torch.cuda.Stream(), torch.zeros(2)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
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
    stream = side()
    with torch.cuda.stream(stream):
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
    stream = side()
    with torch.cuda.stream(stream):
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
        stream = side()
        with torch.cuda.stream(stream):
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
    assert forward > 0
    assert backward > 0
    assert update > 0


@pytest.mark.parametrize("order", ["late", "random 1"])
def test_a_timer_that_does_not_wait_is_found(order: str) -> None:
    """On a side stream, where events have not been reached when they are read."""
    with simulated_cuda(order), torch.cuda.stream(side()):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        values = torch.zeros(4)
        for event in events:
            for _ in range(20):
                values.add_(1)
            event.record()
        with pytest.raises(RuntimeError, match="has not been reached"):
            events[0].elapsed_time(events[1])


def test_a_mark_of_nothing_is_done(device: SimulatedCuda) -> None:
    assert not Mark().wait()
