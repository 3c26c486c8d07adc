"""What side streams wait for and hold, with stand-ins for CUDA's streams and events that write down what is asked."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from retime.foundations.streams import Mark, SideStream
from retime.mechanisms.memory_budget.offload.hosts import HostMemory


class Cuda:
    """Streams and events of one device; every thread begins with a compute stream of its own."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ended = False
        self._now = threading.local()
        self._made = 0

    def current_stream(self, device: object = None) -> "FakeStream":
        if not hasattr(self._now, "stream"):
            name = "compute" if threading.current_thread() is threading.main_thread() else "other"
            self._now.stream = FakeStream(self, name)
        stream: FakeStream = self._now.stream
        return stream

    def new_stream(self, device: object = None) -> "FakeStream":
        self._made += 1
        return FakeStream(self, "side" if self._made == 1 else f"side{self._made}")

    @contextlib.contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self._now.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._now.stream = before


class FakeStream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name, self.device = cuda, name, torch.device("cuda", 0)

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.log.append(f"{self.name} waits for an event of {event.on}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"the host waits for {self.name}")


class FakeEvent:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.on = cuda, "nothing"

    def record(self, stream: FakeStream) -> None:
        self.on = stream.name

    def query(self) -> bool:
        return self.cuda.ended

    def synchronize(self) -> None:
        self.cuda.log.append(f"the host waits for an event of {self.on}")


class Held:
    """Something that must not be freed."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(fake))
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    return fake


def test_work_runs_behind_the_compute_stream_and_is_joined(cuda: Cuda) -> None:
    side = SideStream()
    holder = Held()
    seen = weakref.ref(holder)
    with side.after_current(hold=[holder]):
        assert torch.cuda.current_stream().name == "side"  # type: ignore[attr-defined]
    del holder
    assert torch.cuda.current_stream().name == "compute"  # type: ignore[attr-defined]
    assert cuda.log == ["side waits for compute"]
    assert seen() is not None
    side.join()
    assert cuda.log == ["side waits for compute", "compute waits for side"]
    gc.collect()
    assert seen() is None


def test_work_behind_itself_waits_for_nothing(cuda: Cuda) -> None:
    side = SideStream("cuda")
    with side.after_itself():
        assert torch.cuda.current_stream().name == "side"  # type: ignore[attr-defined]
    assert cuda.log == []


def test_one_stream_is_made_at_the_first_use(cuda: Cuda) -> None:
    side = SideStream("cuda:0")
    side.join()
    side.synchronize()
    assert cuda.log == []
    for _ in range(2):
        with side.after_current():
            pass
    side.synchronize()
    assert cuda.log == ["side waits for compute", "side waits for compute", "the host waits for side"]


def test_a_copy_is_waited_for_and_holds_what_it_reads_until_then(cuda: Cuda) -> None:
    into, source, holder = torch.zeros(3), torch.arange(3.0), Held()
    seen = weakref.ref(holder)
    mark = SideStream("cuda").copy(into, source, hold=[holder])
    del holder
    assert torch.equal(into, source)
    assert seen() is not None
    assert mark.wait()
    assert cuda.log == ["side waits for compute", "compute waits for an event of side"]
    assert seen() is None
    mark.synchronize()
    assert cuda.log[2:] == ["the host waits for an event of side"]


def test_a_copy_that_has_ended_is_waited_for_too(cuda: Cuda) -> None:
    """Race checkers see no queries."""
    holder = Held()
    seen = weakref.ref(holder)
    mark = SideStream("cuda").copy(torch.zeros(3), torch.ones(3), hold=[holder])
    del holder
    cuda.ended = True
    assert not mark.wait()
    assert cuda.log == ["side waits for compute", "compute waits for an event of side"]
    assert seen() is None


def test_the_compute_stream_waits_whatever_thread_asks(cuda: Cuda) -> None:
    mark = SideStream("cuda").copy(torch.zeros(3), torch.ones(3))
    thread = threading.Thread(target=mark.wait)
    thread.start()
    thread.join()
    assert cuda.log[1:] == ["compute waits for an event of side", "other waits for an event of side"]


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


def test_pinned_memory_frees_on_the_stream_that_the_storage_came_from(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread ends a copy, the compute stream waits."""
    monkeypatch.setattr(HostMemory, "_new", lambda self, nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    host = HostMemory("cuda")
    assert host.takes(torch.device("cuda", 0))
    assert not host.takes(torch.device("cuda", 1))
    source = torch.arange(4.0)
    copy = host.store(source.untyped_storage())
    thread = threading.Thread(target=copy.free)
    thread.start()
    thread.join()
    assert "compute waits for an event of side" in cuda.log
    assert host.live_bytes() == 0
    host.close()
    assert cuda.log[-1] == "the host waits for side"
