"""Storages that autograd saves: handed over once their last owner has let go of them, copied out, and brought back.

From then on nothing can write into them. Autograd's version counters do not tell of every write: parts that
``unsafe_chunk`` cuts (so do the kernels of GRU and LSTM) share a storage, and each has a counter of its own; so has
what ``.data`` gives, and a NumPy array has none. What is copied while anybody still holds the storage may be out of
date when it comes back; what is copied afterwards cannot.

The storage is caught at its end by ``__del__``, which Python allows to keep the object. An exception that a signal
handler raises there, Ctrl-C's say, would be printed and lost, so no function of Python's begins there: a generator goes
on, whose ``try`` is open already.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from retime.foundations.messages import Report, show_bytes
from retime.foundations.storages import Window
from retime.foundations.torch_private.engine import FakeTensor
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.memory_budget.offload.tier import HostCopy, HostError, Loading

_TRIES = 3


class Heir(Protocol):
    """Gets a storage that nobody else holds."""

    def inherit(self, storage: torch.UntypedStorage) -> None:
        """Keep the storage, or copy it; once this returns and nothing holds it, it is freed."""


def watch(storage: torch.UntypedStorage, heir: Heir) -> bool:
    """Hand the storage to ``heir``, if that still lives, when all others have let go of it; whether that is possible.

    Not for memory that torch did not allocate, or shares with other processes: it may be written into for ever.
    """
    if not is_torchs_own(storage):
        return False
    watched = cast(_Watched, storage)
    if type(storage) is torch.UntypedStorage:
        watched.__class__ = _Watched
        watched.heirs = []
        words = _last_words(weakref.ref(storage), watched.heirs)
        next(words)
        watched.last_words = words.__next__
    elif type(storage) is not _Watched or gc.is_finalized(storage):  # the end comes to Python's knowledge once
        return False
    watched.heirs[:] = [known for known in watched.heirs if known() is not None]
    watched.heirs.append(weakref.ref(heir))
    return True


def is_torchs_own(storage: torch.UntypedStorage) -> bool:
    """Whether torch allocated the memory, and no other process has it too."""
    return storage.device.type != "cpu" or (bool(storage.resizable()) and not storage.is_shared())


class _Watched(torch.UntypedStorage):
    """What a storage is made while somebody waits for it."""

    heirs: list[weakref.ref[Heir]]
    last_words: Callable[[], Any] = bool  # which does nothing
    __del__ = property(attrgetter("last_words"))

    def clone(self) -> torch.UntypedStorage:
        """A plain one: tensors take no others, which deepcopy would make."""
        return torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self, False)  # type: ignore[no-untyped-call]


def _sent(storage: _Watched) -> tuple[Any, ...]:
    """Send a storage to another process, as a plain one."""
    rebuild, (_, *more) = reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
    return rebuild, (torch.UntypedStorage, *more)


ForkingPickler.register(_Watched, _sent)


def _last_words(
    reference: weakref.ref[torch.UntypedStorage], heirs: list[weakref.ref[Heir]]
) -> Generator[None, None, None]:
    waiting, tries = True, 0
    while tries < _TRIES:
        try:
            if waiting:
                waiting = False
                yield
            _hand_over(reference(), heirs)
            break
        except GeneratorExit:  # the storage is gone already
            return
        except BaseException as error:  # Ctrl-C, or what another signal handler raised
            interruptions.append(error)
            tries += 1
    yield


def _hand_over(storage: torch.UntypedStorage | None, heirs: list[weakref.ref[Heir]]) -> None:
    if storage is None:
        return
    while heirs:
        heir = heirs[-1]()
        if heir is not None:
            _ended.append((heir, storage))
        heirs.pop()
    if not _here.depth:
        with working:
            pass


# ---- when not to work at once

_ended: deque[tuple[Heir, torch.UntypedStorage]] = deque()
interruptions: deque[BaseException] = deque()
"""What :func:`raise_interruption` is to raise."""


class _Here(threading.local):
    depth = 0


_here = _Here()


class _Working:
    """Around all that must not be broken into: garbage may be collected, so storages may end, in the middle of it.

    Those that did are handed over at its end.
    """

    def __enter__(self) -> None:
        _here.depth += 1

    def __exit__(self, *failure: object) -> None:
        try:
            while _ended and _here.depth == 1:
                try:
                    heir, storage = _ended.popleft()
                except IndexError:  # another thread was faster
                    break
                try:
                    heir.inherit(storage)
                except BaseException:
                    _ended.appendleft((heir, storage))
                    raise
                finally:
                    del heir, storage
        finally:
            _here.depth -= 1


working = _Working()


def never_at_once() -> None:
    """Let this thread never be the one to hand over: others wait for it, and it must not wait for them."""
    _here.depth += 1


def raise_interruption() -> None:
    """Raise, in the main thread, what a signal handler raised where it could not be."""
    if interruptions and threading.current_thread() is threading.main_thread():
        error = interruptions.popleft()
        interruptions.clear()
        raise error


# What was moved so far.


@dataclass
class OffloadReport(Report):
    """What an :class:`OffloadSavedTensors` did in all its forward passes.

    Attributes:
        passes: forward passes.
        storages: storages that went to the host.
        bytes_out, bytes_in: bytes copied to the host and back.
        bytes_skipped: bytes that copying every saved tensor would have moved once more.
        stalls: how often the step had to wait for a copy.
        prefetched: storages that were asked for before they were needed.
        mismatches: passes that did not fit the plan, of those that were watched to their end.
    """

    passes: int = 0
    storages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_skipped: int = 0
    stalls: int = 0
    prefetched: int = 0
    mismatches: int = 0

    def what_was_done(self) -> list[str]:
        moved = f"{show_bytes(self.bytes_out)} out and {show_bytes(self.bytes_in)} back"
        return [f"offload: {self.storages} storages in {self.passes} forward passes, {moved}"]

    def what_stayed_plain(self) -> list[str]:
        return [f"{self.mismatches} forward passes that did not fit the plan"] if self.mismatches else []

    def what_was_measured(self) -> list[str]:
        return [
            f"{self.stalls} waits for a copy, {self.prefetched} storages asked for before they were needed",
            f"{show_bytes(self.bytes_skipped)} more would move if each saved tensor did",
        ]

    @classmethod
    def total(cls, reports: Sequence[OffloadReport]) -> OffloadReport | None:
        """All of these; None if there are none."""
        if not reports:
            return None
        return cls(*(sum(getattr(report, name) for report in reports) for name in cls.__dataclass_fields__))


# Copies to the host that still hold the storages they read, and those that failed.


class InFlight:
    """Sources of copies are let go of in order, and as late as a limit allows.

    Of copies that fail where no error can be raised the first is noted, until it can be.

    Args:
        limit_bytes: sources hold so much at most.
        counts: how often a copy had to be waited for is added up there.
    """

    def __init__(self, limit_bytes: int, counts: OffloadReport) -> None:
        self._limit_bytes, self._counts = limit_bytes, counts
        self._copies: deque[tuple[int, weakref.ref[HostCopy]]] = deque()  # bytes; a copy goes with its record
        self._bytes = 0
        self._error: HostError | None = None

    def add(self, nbytes: int, copy: HostCopy) -> None:
        """A copy has begun; settle the oldest ones until those in flight keep the limit.

        Raises:
            HostError: a copy failed; it holds its source on.
        """
        self._copies.append((nbytes, weakref.ref(copy)))
        self._bytes += nbytes
        while self._bytes > self._limit_bytes:
            oldest_bytes, reference = self._copies.popleft()
            self._bytes -= oldest_bytes
            oldest = reference()
            if oldest is not None:
                self._counts.stalls += oldest.settle()

    def check(self) -> None:
        """Raise what is known to have failed so far; does not wait.

        Raises:
            HostError: a copy failed.
        """
        self.raise_noted()
        for _, reference in self._copies:
            copy = reference()
            if copy is not None:
                copy.check()

    def clear(self) -> None:
        """Forget all of them."""
        self._copies.clear()

    def note(self, error: HostError) -> None:
        """A copy failed where that cannot be raised."""
        self._error = self._error or error

    def raise_noted(self) -> None:
        """Raise what was noted, once.

        Raises:
            HostError: a copy failed.
        """
        if interruptions:
            raise_interruption()
        error, self._error = self._error, None
        if error is not None:
            raise error


# What a saved-tensor hook hands to autograd in place of a tensor, and the check that hooks switch off.
#
# Autograd compares a saved tensor's version with the one it had when it was saved, and refuses to go on after an edit
# in place. With hooks it leaves that to them.


def _edited(what: str, version: int, expected: int) -> RuntimeError:
    """Return autograd's error about a tensor that was edited in place after it was saved."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: [{what}] is "
        f"at version {version}; expected version {expected} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )


class ResidentTensor:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A saved output that kept its history would hold its own node, and the graph would never be freed.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = version_of(tensor)

    def get(self) -> Tensor:
        """The tensor, as it was saved.

        Raises:
            RuntimeError: it was edited in place since.
        """
        if version_of(self.tensor) != self.version:
            what = f"{self.tensor.type()} {list(self.tensor.shape)}"
            raise _edited(what, version_of(self.tensor), self.version)
        return self.tensor


class OffloadedStorage:
    """One storage that a forward pass saved, and that goes to the host when nobody else holds it any more.

    Attributes:
        number: its ordinal in the plan.
        copy: its bytes on the host, once it went there.
        saves: how often it was saved.
        last_save: when it was saved last, counted over all saves of the pass: the later, the sooner the backward pass
            needs it.
        uses_left: saves that this backward pass has not asked for yet.
        used_in: the backward pass that used it last.
        done_in: the backward pass that used all its saves.
        retained: the storage that came back, while it is sure to be needed again.
    """

    def __init__(
        self, number: int, tensor: Tensor, offload: Callable[[OffloadedStorage, torch.UntypedStorage], None]
    ) -> None:
        source = tensor.untyped_storage()
        self.number = number
        self.nbytes = source.nbytes()
        self.device = tensor.device
        self.copy: HostCopy | None = None
        self.saves = 0
        self.last_save = -1
        self.uses_left = 0
        self.used_in = -1
        self.done_in = -1
        self.retained: torch.UntypedStorage | None = None
        self.loading: Loading | None = None
        self._offload = offload
        self._source = weakref.ref(source)
        self._stays: torch.UntypedStorage | None = None
        self._restored: weakref.ref[torch.UntypedStorage] | None = None

    def inherit(self, storage: torch.UntypedStorage) -> None:
        """Nobody else holds the storage: from now on it stays as it is."""
        if self.copy is not None or self._stays is not None:
            return
        if is_torchs_own(storage):
            self._offload(self, storage)
        if self.copy is None:
            self._stays = storage

    def present(self) -> torch.UntypedStorage | None:
        """The data on the device, if it is there or on its way."""
        return self._source() or self.retained or (None if self._restored is None else self._restored())

    def fetch(self) -> torch.UntypedStorage:
        """Start to bring the data back into a new storage, and hold that.

        Raises:
            RuntimeError: the storage has ended without having come here.
        """
        if self.copy is None:
            raise RuntimeError("a saved tensor was lost, because its copy to the host was interrupted")
        with torch.no_grad():
            storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        self.loading = self.copy.load(storage)
        self._restored = weakref.ref(storage)
        self.retained = storage
        return storage

    def wait(self) -> bool:
        """Have the data that :meth:`fetch` asked for; whether it had to be waited for."""
        loading, self.loading = self.loading, None
        return loading.wait() if loading is not None else False

    def let_go(self) -> None:
        """Hold the data no longer; a tensor that looks at it still does."""
        self.wait()
        self.retained = None

    def free(self) -> None:
        """Leave nothing on the host, and need nothing any more."""
        self.retained = self._stays = None
        if self.copy is not None:
            self.copy.free()


class OffloadedTensor:
    """A saved tensor whose storage goes to the host: it keeps the counter of the tensor's versions, not its storage."""

    __slots__ = ("_counter", "_first_version", "_what", "storage", "window")

    def __init__(self, storage: OffloadedStorage, tensor: Tensor) -> None:
        self.storage = storage
        self.window = Window.of(tensor)
        self._first_version = version_of(tensor)
        self._what = f"{tensor.type()} {list(tensor.shape)}" if not isinstance(tensor, FakeTensor) else ""
        self._counter: Tensor | None = None
        if self._what:
            counter = tensor.detach()  # shares the counter
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # keeps it, and lets the storage go
            self._counter = counter

    def check(self) -> None:
        """Raise as autograd does when the tensor was edited in place after it was saved.

        Raises:
            RuntimeError: it was.
        """
        if self._counter is not None and version_of(self._counter) != self._first_version:
            raise _edited(self._what, version_of(self._counter), self._first_version)
