"""A CUDA stream for updates that run beside the backward pass; on other devices, nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class SideStream:
    """Runs work behind what the current stream has been given so far, and joins it later.

    Tensors the work reads are held until :meth:`join` instead of being marked with ``record_stream``: their memory is
    reused at a known point, not whenever the allocator notices.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._held: list[Any] = []

    @contextlib.contextmanager
    def after_current(self, hold: list[Any]) -> Iterator[None]:
        """Work in here runs on the side stream, after everything the current stream has been given."""
        if not torch.cuda.is_available():
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        self._held += hold
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream waits for all work given so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._held.clear()
