"""Programs with streams, each right and with one fault seeded: the simulation finds all faults, and nothing else.

A fault is found if it is listed or if numbers come out wrong, in one order of execution or more. Right programs pass in
all orders.
"""

import threading
from collections.abc import Callable

import pytest
import torch

from retime.foundations.streams import SideStream
from support.simulated_cuda import ORDERS, simulated_cuda
from support.simulated_streams import side

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


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_a_right_program_is_right_in_every_order(function: Program) -> None:
    assert {order: run(function, order, right=True) for order in ORDERS} == dict.fromkeys(ORDERS, (True, []))


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_a_seeded_fault_is_found(function: Program) -> None:
    seen = [run(function, order, right=False) for order in ORDERS]
    assert any(faults or not numbers for numbers, faults in seen)


def test_there_are_enough_of_them() -> None:
    assert len(PROGRAMS) >= 20


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
        tensor = torch.ones(4)
    torch.cuda.current_stream().wait_stream(stream)
    doubled = tensor * 2
    if right:
        tensor.record_stream(torch.cuda.current_stream())
    del tensor
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
    gradients, event = [gradient], stream.record_event()
    del gradient
    if not right:
        gradients.clear()
    torch.zeros(4)
    event.wait()
    gradients.clear()
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
