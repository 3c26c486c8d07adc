"""Streams and events of the simulation of CUDA (``simulated_cuda.py``): what torch.cuda has to order work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from support.simulated_cuda import SimulatedCuda


def side() -> Any:
    """A new stream behind what the current one has been given."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return stream


@contextmanager
def on_side() -> Iterator[Any]:
    """Give what runs inside to a new stream behind what the current one has been given."""
    stream = side()
    with torch.cuda.stream(stream):
        yield stream


class Stream:
    """A queue of kernels, as ``torch.cuda.Stream``.

    Args:
        cuda: the simulation.
        priority: kept for who asks; the order of execution is the simulation's.
        immediate: whether kernels run when they are launched.
    """

    def __init__(self, cuda: SimulatedCuda, priority: int = 0, *, immediate: bool = False) -> None:
        self.cuda, self.priority, self.immediate = cuda, priority, immediate
        self.device = torch.device("cuda", 0)
        self.queue: deque[Callable[[], None]] = deque()
        self.launched = 0
        self.ready_ms = 0.0
        self.cuda_stream = self.stream_id = cuda.add_stream(self)

    def __repr__(self) -> str:
        return f"stream {self.stream_id}" if self.stream_id else "the default stream"

    @property
    def executed(self) -> int:
        """How many of its kernels and waits have run."""
        return self.launched - len(self.queue)

    def wait_event(self, event: Event) -> None:
        """Run what is launched from now on after the event."""
        self.cuda.wait(self, event)

    def wait_stream(self, stream: Stream) -> None:
        """Run what is launched from now on after what that stream has been given so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Set an event behind what has been launched so far."""
        event = Event(self.cuda) if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all has run."""
        self.cuda.run_some()
        return not self.queue

    def synchronize(self) -> None:
        """Let the host wait for all that has been launched."""
        self.cuda.not_in_capture("Stream.synchronize")
        with self.cuda.lock:
            self.execute(self.launched)
            self.cuda.checker._handle_stream_synchronization(self.stream_id)
            self.cuda.host_ms = max(self.cuda.host_ms, self.ready_ms)

    def execute(self, upto: int) -> None:
        """Run kernels until so many have run."""
        while self.queue and self.executed < upto:
            self.queue.popleft()()


class Event:
    """A point in a stream, as ``torch.cuda.Event``."""

    def __init__(self, cuda: SimulatedCuda, *, enable_timing: bool = False) -> None:
        self.cuda, self.enable_timing = cuda, enable_timing
        self.stream: Stream | None = None
        self.position = 0
        self.at_ms = 0.0
        self.number = next(cuda.numbers)
        cuda.checker._handle_event_creation(self.number)

    def record(self, stream: Stream | None = None) -> None:
        """Move the event behind all that ``stream``, or the current one, has been given so far."""
        if self.cuda.capture is not None:
            self.stream = stream or self.cuda.current_stream()
            self.cuda.capture.note_record(self, self.stream)
            return
        with self.cuda.lock:
            self.stream = stream or self.cuda.current_stream()
            self.position, self.at_ms = self.stream.launched, self.stream.ready_ms
            self.cuda.checker._handle_event_record(self.number, self.stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        """Let ``stream``, or the current one, wait; an event that was never recorded is none to wait for."""
        self.cuda.wait(stream or self.cuda.current_stream(), self)

    def query(self) -> bool:
        """Whether all before it has run."""
        self.cuda.not_in_capture("Event.query")
        self.cuda.run_some()
        return self.stream is None or self.stream.executed >= self.position

    def synchronize(self) -> None:
        """Let the host wait."""
        self.cuda.not_in_capture("Event.synchronize")
        with self.cuda.lock:
            if self.stream is not None:
                self.stream.execute(self.position)
            self.cuda.checker._handle_event_synchronization(self.number)
            self.cuda.host_ms = max(self.cuda.host_ms, self.at_ms)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds by the device's clock from this event to ``end_event``.

        Raises:
            RuntimeError: one of them measures no time, was not recorded, or has not been reached.
        """
        for event in (self, end_event):
            if not event.enable_timing or event.stream is None:
                raise RuntimeError("both events must be recorded, and made with enable_timing=True")
            if not event.stream.executed >= event.position:
                raise RuntimeError("an event has not been reached: synchronize it first")
        return end_event.at_ms - self.at_ms
