"""Programs with streams, each right and with one fault seeded: the simulation finds all faults, and nothing else.

A fault is found if it is listed or if numbers come out wrong, in one order of execution or more. Right programs pass in
all orders.
"""

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from retime.foundations.streams import Mark, SideStream
from retime.mechanisms.memory_budget.offload.hosts import HostMemory, parse_host
from support.simulated_cuda import ORDERS, simulated_cuda
from support.simulated_streams import on_side, side


@dataclass
class Programs:
    """Methods are programs, which return whether their numbers came out right.

    Attributes:
        right: whether the program is to be right.
    """

    right: bool

    # Kernels on two streams.

    def what_the_side_stream_reads_is_overwritten(self) -> bool:
        source, into = torch.ones(4), torch.zeros(4)
        with on_side() as stream:
            into.add_(source)
        if self.right:
            torch.cuda.current_stream().wait_stream(stream)
        source.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        return into.tolist() == [1] * 4

    def two_side_streams_write_the_same(self) -> bool:
        total = torch.zeros(4)
        one, two = side(), side()
        with torch.cuda.stream(one):
            total.add_(1)
        if self.right:
            two.wait_stream(one)
        with torch.cuda.stream(two):
            total.mul_(3)
        for stream in (one, two):
            torch.cuda.current_stream().wait_stream(stream)
        return total.tolist() == [3] * 4

    def an_event_is_recorded_before_the_work(self) -> bool:
        into = torch.zeros(4)
        stream, event = side(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            if not self.right:
                event.record()
            into.add_(1)
            if self.right:
                event.record()
        event.wait()
        return (into * 2).tolist() == [2] * 4

    def an_event_is_waited_for_that_nobody_recorded(self) -> bool:
        into = torch.zeros(4)
        stream, event = side(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            into.add_(1)
        if self.right:
            stream.record_event(event)
        torch.cuda.current_stream().wait_event(event)
        return (into * 2).tolist() == [2] * 4

    def one_event_stands_for_two_kernels(self) -> bool:
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
        if self.right:
            event.wait()
        return (first + second).tolist() == [3] * 4

    def another_threads_stream_waits(self) -> bool:
        """The current stream of a thread is its own."""
        into, user = torch.zeros(4), torch.cuda.Stream()
        with on_side() as stream:
            into.add_(1)
            event = stream.record_event()

        def wait() -> None:
            event.wait(user if self.right else None)

        with torch.cuda.stream(user):
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
            doubled = into * 2
        torch.cuda.current_stream().wait_stream(user)
        return doubled.tolist() == [2] * 4

    def a_wait_is_skipped_where_query_says_done(self) -> bool:
        into = torch.zeros(4)
        with on_side() as stream:
            into.add_(1)
            event = stream.record_event()
        if self.right or not event.query():
            event.wait()
        return (into * 2).tolist() == [2] * 4

    def a_chain_of_three_streams_misses_its_middle(self) -> bool:
        values = torch.ones(4)
        first, second = side(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            values.add_(1)
            between = first.record_event()
        if self.right:
            second.wait_event(between)
        with torch.cuda.stream(second):
            after = second.record_event()
        torch.cuda.current_stream().wait_event(after)
        return (values * 2).tolist() == [4] * 4

    def a_new_tensor_of_the_side_stream_is_read_at_once(self) -> bool:
        values = torch.arange(4.0)
        with on_side() as stream:
            total = values.exp().log().sum()
        if self.right:
            torch.cuda.current_stream().wait_stream(stream)
        return abs((total + 1).item() - 7) < 0.01

    # Memory that is used again.

    def a_target_is_freed_before_it_was_written(self) -> bool:
        """Whoever gets the memory next is written over."""
        source, into = torch.ones(4), torch.zeros(4)
        with on_side() as stream:
            into.copy_(source, non_blocking=True)
        if self.right:
            into.record_stream(stream)
        del into
        torch.zeros(4)
        torch.cuda.current_stream().wait_stream(stream)
        return True

    def a_stream_is_recorded_but_not_the_one_that_reads(self) -> bool:
        source, into = torch.ones(4), torch.zeros(4)
        stream, other = side(), side()
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        source.record_stream(stream if self.right else other)
        del source
        torch.zeros(4)
        torch.cuda.current_stream().wait_stream(stream)
        return into.tolist() == [1] * 4

    def a_tensor_of_the_side_stream_is_freed_while_the_default_stream_reads_it(self) -> bool:
        """Its memory belongs to the stream on which it was allocated, which need not wait for the reader."""
        with on_side() as stream:
            tensor = torch.ones(4)
        torch.cuda.current_stream().wait_stream(stream)
        doubled = tensor * 2
        if self.right:
            tensor.record_stream(torch.cuda.current_stream())
        del tensor
        with torch.cuda.stream(stream):
            torch.zeros(4)
        return doubled.tolist() == [2] * 4

    def what_an_event_holds_is_let_go_of_when_it_is_recorded(self) -> bool:
        """Tensors are held until the event was waited for, in the place of ``record_stream``."""
        gradient, total = torch.ones(4), torch.zeros(4)
        with on_side() as stream:
            total.add_(gradient)
        gradients, event = [gradient], stream.record_event()
        del gradient
        if not self.right:
            gradients.clear()
        torch.zeros(4)
        event.wait()
        gradients.clear()
        torch.zeros(4)
        return total.tolist() == [1] * 4

    # Pinned memory and the host.

    def the_host_reads_before_the_copy_has_come(self) -> bool:
        source, pinned = torch.ones(()), torch.zeros((), pin_memory=True)
        pinned.copy_(source, non_blocking=True)
        if self.right:
            torch.cuda.current_stream().synchronize()
        return pinned.item() == 1

    def a_blocking_copy_is_taken_for_the_other_kind(self) -> bool:
        source, pinned = torch.ones(4), torch.zeros(4, pin_memory=True)
        with on_side():
            pinned.copy_(source, non_blocking=not self.right)
        return pinned.tolist() == [1] * 4

    def the_host_waits_for_the_wrong_stream(self) -> bool:
        source, pinned = torch.ones(4), torch.zeros(4, pin_memory=True)
        with on_side() as stream:
            pinned.copy_(source, non_blocking=True)
        (stream if self.right else torch.cuda.current_stream()).synchronize()
        return pinned.tolist() == [1] * 4

    def the_host_writes_what_is_being_copied_to_the_device(self) -> bool:
        into, pinned = torch.zeros(4), torch.ones(4).pin_memory()
        with on_side() as stream:
            into.copy_(pinned, non_blocking=True)
            event = stream.record_event()
        if self.right:
            event.synchronize()
        pinned.zero_()
        torch.cuda.synchronize()
        return into.tolist() == [1] * 4

    # Our own.

    def a_copys_mark_is_not_waited_for(self) -> bool:
        source, into = torch.arange(4.0), torch.zeros(4)
        mark = SideStream("cuda").copy(into, source, hold=[source])
        if self.right:
            mark.wait()
        return (into + 1).tolist() == [1, 2, 3, 4]

    def a_mark_is_waited_for_by_a_thread_with_a_stream_of_its_own(self) -> bool:
        """The stream on which the copy was given waits too, or else the caller's."""
        source, into = torch.arange(4.0), torch.zeros(4)
        mark = SideStream("cuda").copy(into, source, hold=[source])

        def wait() -> None:
            if self.right:
                mark.wait()

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        return (into + 1).tolist() == [1, 2, 3, 4]

    def a_copy_holds_nothing(self) -> bool:
        source, into = torch.ones(4), torch.zeros(4)
        mark = SideStream("cuda").copy(into, source, hold=[source] if self.right else [])
        del source
        torch.zeros(4)
        mark.wait()
        return into.tolist() == [1] * 4

    def a_side_stream_runs_behind_itself_only(self) -> bool:
        stream, total = SideStream("cuda"), torch.zeros(4)
        total.add_(1)
        with stream.after_current() if self.right else stream.after_itself():
            total.mul_(2)
        stream.join()
        return total.tolist() == [2] * 4

    def a_side_stream_is_not_joined(self) -> bool:
        stream, total = SideStream("cuda"), torch.zeros(4)
        with stream.after_current():
            total.add_(1)
        if self.right:
            stream.join()
        return (total + 1).tolist() == [2] * 4


PROGRAMS = [name for name in vars(Programs) if not name.startswith("_")]


def run(name: str, order: str, right: bool) -> tuple[bool, list[str]]:
    with simulated_cuda(order) as device:
        numbers = getattr(Programs(right), name)()
    return numbers, device.faults


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_is_right_in_every_order(name: str) -> None:
    assert {order: run(name, order, right=True) for order in ORDERS} == dict.fromkeys(ORDERS, (True, []))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_seeded_fault_is_found(name: str) -> None:
    seen = [run(name, order, right=False) for order in ORDERS]
    assert any(faults or not numbers for numbers, faults in seen)


class Held:
    """Something that must not be freed."""


def test_work_is_held_until_it_is_joined() -> None:
    with simulated_cuda("late") as device:
        side, default, holder = SideStream("cuda"), torch.cuda.current_stream(), Held()
        seen = weakref.ref(holder)
        with side.after_current(hold=[holder]):
            assert torch.cuda.current_stream() is not default
        del holder
        assert torch.cuda.current_stream() is default
        assert seen() is not None
        side.join()
        gc.collect()
        assert seen() is None
    assert device.faults == []


def test_one_stream_is_made_at_the_first_use() -> None:
    with simulated_cuda(), pytest.MonkeyPatch.context() as patched:
        made: list[Any] = []
        stream = torch.cuda.Stream
        patched.setattr(torch.cuda, "Stream", lambda *given, **named: made.append(stream(*given, **named)) or made[-1])
        side = SideStream("cuda:0")
        side.join()
        side.synchronize()
        assert not made
        for _ in range(2):
            with side.after_current():
                assert torch.cuda.current_stream() is made[0]
        assert len(made) == 1


@pytest.mark.parametrize(("order", "waits"), [("late", True), ("eager", False)])
def test_a_copy_holds_what_it_reads_until_it_was_waited_for(order: str, waits: bool) -> None:
    """Also where it has ended by then."""
    with simulated_cuda(order) as device:
        into, source, holder = torch.zeros(3), torch.arange(3.0), Held()
        seen = weakref.ref(holder)
        mark = SideStream("cuda").copy(into, source, hold=[holder])
        del holder
        assert seen() is not None
        assert mark.wait() is waits
        assert seen() is None
        mark.synchronize()
        torch.cuda.synchronize()
        assert into.tolist() == [0.0, 1.0, 2.0]
    assert device.faults == []


def test_without_cuda_work_runs_at_once_and_nobody_waits() -> None:
    side = SideStream("cpu")
    holder = Held()
    seen = weakref.ref(holder)
    with side.after_current(hold=[holder]):
        pass
    del holder
    assert seen() is None
    into, holder = torch.zeros(2), Held()
    seen = weakref.ref(holder)
    mark = side.copy(into, torch.ones(2), hold=[holder])
    del holder
    assert into.tolist() == [1.0, 1.0]
    assert seen() is not None
    assert not mark.wait()
    assert seen() is None
    mark.synchronize()
    with side.after_itself():
        side.join()
    side.synchronize()
    assert not Mark().wait()


def test_host_memory_takes_storages_of_its_device_and_lets_any_thread_free_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated_cuda("late") as device:
        host, source = parse_host("memory", "cpu"), torch.arange(4.0)
        thread = threading.Thread(target=host.store(source.untyped_storage()).free)
        thread.start()
        thread.join()
        assert host.live_bytes() == 0
        host.close()
        torch.cuda.synchronize()
    assert device.faults == []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert HostMemory("cuda").takes(torch.device("cuda", 0))
    assert not HostMemory("cuda").takes(torch.device("cuda", 1))
