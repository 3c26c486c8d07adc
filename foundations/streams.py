"""A CUDA stream beside the compute stream; on other devices work runs where it is, and nothing waits.

Tensors that work on a side stream reads or writes are held until the compute stream has been made to wait for it,
instead of being marked with ``record_stream``: their memory is used again at a known point, not whenever the allocator
notices, so that the peak is the same in every step. The host itself waits in ``synchronize`` only.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Mark", "SideStream", "has_streams"]

DEVICE_TYPES_WITH_STREAMS = frozenset({"cuda"})
"""Tests that simulate streams over CPU tensors put "cpu" here."""


def has_streams(device: torch.device) -> bool:
    """Return whether work on this device runs on streams, beside the host and beside other streams' work."""
    return device.type in DEVICE_TYPES_WITH_STREAMS


class Mark:
    """The end of some work: whoever uses what it wrote, or frees what it read, waits for it first.

    Args:
        event: behind the work; None: it is done already.
        given_on: the compute stream when the work was given, on which the memory it uses was allocated.
        hold: what must not be freed before the compute stream waits.
    """

    def __init__(
        self, event: torch.cuda.Event | None = None, given_on: torch.cuda.Stream | None = None, hold: Iterable[Any] = ()
    ) -> None:
        self._event = event
        self._given_on = given_on
        self._held = list(hold)

    def wait(self) -> bool:
        """Let the compute stream wait, and the calling thread's if that is another; frees what is held.

        The streams wait even if the work has ended already: race checkers see no queries, and the order of kernels is
        then the same in every step.

        Returns:
            Whether the work was still to be done.
        """
        event, stream = self._event, self._given_on
        unfinished = False
        if event is not None and stream is not None:
            unfinished = not event.query()  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_event(event)
        self._held.clear()
        return unfinished

    def synchronize(self) -> None:
        """Let the host wait."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """Runs work behind what the compute stream, the current one, has been given so far.

    Args:
        device: whose stream it is; None: the CUDA device that is current at the first use, if there is one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        self._held: list[Any] = []

    @contextlib.contextmanager
    def after_current(self, hold: Iterable[Any] = ()) -> Iterator[None]:
        """Work in here runs behind all that the compute stream has been given; ``hold`` is held until :meth:`join`."""
        stream = self._get()
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._held += hold
        with torch.cuda.stream(stream):
            yield

    @contextlib.contextmanager
    def after_itself(self) -> Iterator[None]:
        """Work in here runs behind what this stream has been given, whatever the compute stream does."""
        stream = self._get()
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            yield

    def copy(self, into: Tensor, source: Tensor, hold: Iterable[Any] = ()) -> Mark:
        """``into <- source`` behind everything the compute stream has been given; ``hold`` is held by the mark."""
        stream = self._get()
        if stream is None:
            into.copy_(source)
            return Mark(hold=hold)
        given_on = torch.cuda.current_stream(stream.device)
        with self.after_current():
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return Mark(event, given_on, hold)

    def join(self) -> None:
        """The compute stream waits for all work given so far; what was held is free."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._held.clear()

    def synchronize(self) -> None:
        """The host waits for all work given so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def _get(self) -> torch.cuda.Stream | None:
        if self._stream is None and has_streams(self._device):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._stream
