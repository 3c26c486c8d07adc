"""A call that stops on its way and goes on later: a user's training step, cut where its layers lie on other ranks.

Each call runs in a thread of its own, but only one of them, or the caller, runs at any time. So what a thread keeps to
itself (grad mode, autocast, saved-tensor hooks) stays with its micro-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from retime.foundations.preserve_state import seed_torch

__all__ = ["Returned", "SuspendedCall", "Workers", "current_call", "draw_for"]

_HERE = threading.local()
_OTHER_NUMBERS = 0x9E3779B97F4A7C15
"""Layers of one micro-batch draw from seeds that are this far apart."""


@dataclass(frozen=True)
class Returned:
    """The call has come to its end.

    Attributes:
        value: that it returned.
    """

    value: Any


class _Closed(BaseException):
    """The rest of the call is not wanted."""


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class Workers:
    """Threads that wait for calls: one that is done serves the next call, as each has a team of OpenMP's own."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []

    def run(self, task: Callable[[], None]) -> None:
        """Let a thread run ``task``, which must not raise."""
        if self._idle:
            self._idle.pop().put(task)
            return
        inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        inbox.put(task)
        threading.Thread(target=self._serve, args=(inbox,), name="retime-pipeline", daemon=True).start()

    def stop(self) -> None:
        """Let the idle threads end."""
        while self._idle:
            self._idle.pop().put(None)

    def _serve(self, inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := inbox.get()) is not None:
            task()
            del task
            self._idle.append(inbox)


class SuspendedCall:
    """A call that has not begun yet.

    Args:
        call: without arguments.
        workers: one of which runs it.
        seed: of what it draws in front of the layers; each layer behind the first has one of its own, so that numbers
            do not depend on where the model is cut. None: nothing is seeded.

    Attributes:
        leaves: what received tensors are inside of the call, from the last edge on.
        received: by layer and place in its arguments, those that a checkpoint around the layer computes from again.
    """

    def __init__(self, call: Callable[[], Any], workers: Workers, seed: int | None = None) -> None:
        self.leaves: list[Tensor] = []
        self.received: dict[int, dict[int, Tensor]] = {}
        self._seed = seed
        self._call: Callable[[], Any] | None = call
        self._workers = workers
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._wants_end = False

    def resume(self, value: Any = None) -> Any:
        """Run until the call stops, and return what it stopped with, or :class:`Returned`.

        Args:
            value: what :meth:`stop` returns inside of the call.

        Raises:
            BaseException: the call's own.
        """
        outer = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            if self._call is not None:
                self._workers.run(self._run)
            else:
                self._inbox.put(value)
            answer = self._outbox.get()
        finally:
            self._dtype = torch.get_default_dtype()
            torch.set_default_dtype(outer)
        if isinstance(answer, _Failed):
            raise answer.error
        return answer

    def stop(self, value: Any) -> Any:
        """Inside of the call: hand ``value`` to :meth:`resume`, and wait for the next one's."""
        self._outbox.put(value)
        answer = self._inbox.get()
        if self._wants_end:
            raise _Closed
        return answer

    def draw_for(self, layer: int) -> None:
        """Inside of the call: a layer begins."""
        if self._seed is not None:
            draw_for(layer, self._seed)

    def close(self) -> None:
        """The rest is not wanted: the call ends where it stands, with its ``finally`` blocks."""
        if self._wants_end or self._call is not None:
            return
        self._wants_end = True
        self._inbox.put(None)
        self._outbox.get()

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        _HERE.call = self
        answer: Any
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            with torch.set_grad_enabled(self._grad):
                answer = Returned(call())
        except BaseException as error:
            answer = _Failed(error)
        del call
        _HERE.call = None
        self._wants_end = True
        self._outbox.put(answer)


def draw_for(layer: int, seed: int) -> None:
    """A layer begins in a call with this seed; the first one draws what it draws without a pipeline."""
    if layer:
        seed_torch((seed + _OTHER_NUMBERS * layer) % 2**63)


def current_call() -> SuspendedCall | None:
    """The call that this thread runs."""
    call: SuspendedCall | None = getattr(_HERE, "call", None)
    return call
