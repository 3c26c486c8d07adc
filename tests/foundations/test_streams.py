"""What side streams hold, and until when, on a simulated CUDA device; orders that they need: test_stream_faults.py."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from retime.foundations.streams import Mark, SideStream
from retime.mechanisms.memory_budget.offload.hosts import HostMemory, parse_host
from support.simulated_cuda import simulated_cuda


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
