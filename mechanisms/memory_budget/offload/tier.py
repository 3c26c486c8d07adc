"""Where offloaded storages go: the protocol of a host tier, its error, and when nobody else holds a storage.

What objects leave to be done at their end, and what a signal handler raised meanwhile, wait for the next call.
"""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, NoReturn, Protocol, cast

import torch
from torch.multiprocessing import reductions

# What objects leave to be done when they have ended, done at the next occasion.
#
# A finaliser of Python's would do it at once, but an exception that a signal handler raises in one, Ctrl-C's say, is
# printed and lost; and it may run in the middle of anything, on any thread. Here only a queue is appended to, in C.


class _Finalizer(weakref.ref[object]):
    __slots__ = ("then",)
    then: Callable[[], object]


class Finalizers:
    """Things to do when objects have ended."""

    def __init__(self) -> None:
        self._finalizers: dict[int, _Finalizer] = {}
        self._due: deque[weakref.ref[object]] = deque()

    def when_gone(self, owner: object, then: Callable[[], object]) -> None:
        """Do this at the first :meth:`see_to` after ``owner``'s end; ``then`` must not hold it."""
        finalizer = _Finalizer(owner, self._due.append)
        finalizer.then = then
        self._finalizers[id(finalizer)] = finalizer

    def see_to(self) -> None:
        """Do what is due. One that is interrupted is done again: twice must be as good as once."""
        while self._due:
            finalizer = self._due[0]
            if id(finalizer) in self._finalizers:
                self._finalizers[id(finalizer)].then()
                del self._finalizers[id(finalizer)]
            self._due.popleft()


class HostError(OSError):
    """The host tier cannot hold or give back a storage: no space, no such folder, a device that fails.

    Raised where a forward pass saves a tensor or ends, so that no gradient of this pass exists yet. Only a read that
    fails is raised in the backward pass: gradients may be half accumulated then, and have to be zeroed.
    """


class Loading(Protocol):
    """A copy from the host into device memory that was started."""

    def wait(self) -> bool:
        """Have the data where it is needed; whether this call had to wait for it.

        Raises:
            HostError: the data could not be read.
        """


class HostCopy(Protocol):
    """One storage's bytes on the host, from the moment the copy out was started."""

    nbytes: int

    def settle(self) -> bool:
        """Finish the copy out and drop this object's reference to the source; whether it had to be waited for.

        Raises:
            HostError: the copy failed. The source is kept then: nothing is lost.
        """

    def check(self) -> None:
        """Raise what is known to have failed so far; does not wait.

        Raises:
            HostError: the copy failed.
        """

    def load(self, into: torch.UntypedStorage) -> Loading:
        """Start the copy back into a storage of the same size."""

    def free(self) -> None:
        """Give the space back. A copy under way goes on to its end, holding what it needs; nobody waits for it.

        Doing so twice is harmless. So does dropping the last reference to this object, at the tier's next call.
        """


class HostTier(Protocol):
    """Holds storages that left the device."""

    def takes(self, device: torch.device) -> bool:
        """Return whether storages on that device can be moved here."""

    def reserve(self, nbytes: int, storages: int) -> None:
        """Have space for so many bytes in so many storages at once, so that a full host shows before a step begins.

        What was reserved before is given up as far as it is more than that, and nothing is held there.

        Raises:
            HostError: there is no such space.
        """

    def store(self, source: torch.UntypedStorage) -> HostCopy:
        """Start to copy a storage out.

        Raises:
            HostError: there is no space.
        """

    def close(self) -> None:
        """Give back space, threads and files. Doing so twice is harmless."""


# Host tiers that keep no data.


class HostNull:
    """For replays of a step with fake tensors: takes storages of any device, gives back whatever the memory holds."""

    def takes(self, device: torch.device) -> bool:
        return True

    def reserve(self, nbytes: int, storages: int) -> None:
        """There is always space."""

    def store(self, source: torch.UntypedStorage) -> _NullCopy:
        return _NullCopy(source)

    def close(self) -> None:
        """Nothing is held."""


class _NullCopy:
    def __init__(self, source: torch.UntypedStorage) -> None:
        self.nbytes = source.nbytes()
        self._source: torch.UntypedStorage | None = source  # as a real copy does until it has ended

    def settle(self) -> bool:
        self._source = None
        return False

    def check(self) -> None:
        pass

    def load(self, into: torch.UntypedStorage) -> _NullLoading:
        return _NullLoading()

    def free(self) -> None:
        self._source = None


class _NullLoading:
    def wait(self) -> bool:
        return False


class HostNone(HostNull):
    """Takes nothing: for steps under which no saved-tensor hooks can be, so that nobody knows what they save."""

    def takes(self, device: torch.device) -> bool:
        return False

    def store(self, source: torch.UntypedStorage) -> NoReturn:
        raise HostError(errno.ENOSYS, "this step's tensors cannot be offloaded")


def check_host(host: object) -> None:
    """Raise what to give instead of something that holds no storages.

    Raises:
        TypeError: it is no host tier.
    """
    if not callable(getattr(host, "store", None)):
        given = f"parse_host({host!r}, device)" if isinstance(host, str) else "what parse_host() returns"
        raise TypeError(f"host={host!r} is no host tier: give {given}")


# Storages whose last owner has let go of them
#
# From then on nothing can write into them. Autograd's version counters do not tell of every write: parts that
# ``unsafe_chunk`` cuts (so do the kernels of GRU and LSTM) share a storage, and each has a counter of its own; so has
# what ``.data`` gives, and a NumPy array has none. What is copied while anybody still holds the storage may be out of
# date when it comes back; what is copied afterwards cannot.
#
# The storage is caught at its end by ``__del__``, which Python allows to keep the object. An exception that a signal
# handler raises there, Ctrl-C's say, would be printed and lost, so no function of Python's begins there: a generator
# goes on, whose ``try`` is open already.

_TRIES = 3


class ReleaseListener(Protocol):
    """Gets a storage that nobody else holds."""

    def on_release(self, storage: torch.UntypedStorage) -> None:
        """Keep the storage, or copy it; once this returns and nothing holds it, it is freed."""


def watch(storage: torch.UntypedStorage, listener: ReleaseListener) -> bool:
    """Hand the storage to ``listener``, if that still lives, when all others have let go of it; whether it can be.

    Not for memory that torch did not allocate, or shares with other processes: it may be written into for ever.
    """
    if not is_torchs_own(storage):
        return False
    watched = cast(_Watched, storage)
    if type(storage) is torch.UntypedStorage:
        watched.__class__ = _Watched
        watched.listeners = []
        finalizer = _finalizer_of(weakref.ref(storage), watched.listeners)
        next(finalizer)
        watched.finalize = finalizer.__next__
    elif type(storage) is not _Watched or gc.is_finalized(storage):  # the end comes to Python's knowledge once
        return False
    watched.listeners[:] = [reference for reference in watched.listeners if reference() is not None]
    watched.listeners.append(weakref.ref(listener))
    return True


def is_torchs_own(storage: torch.UntypedStorage) -> bool:
    """Return whether torch allocated the memory, and no other process has it too."""
    return storage.device.type != "cpu" or (bool(storage.resizable()) and not storage.is_shared())


class _Watched(torch.UntypedStorage):
    """Class of a storage while somebody waits for it."""

    listeners: list[weakref.ref[ReleaseListener]]
    finalize: Callable[[], Any] = bool  # which does nothing
    __del__ = property(attrgetter("finalize"))

    def clone(self) -> torch.UntypedStorage:
        """A plain one: tensors take no others, which deepcopy would make."""
        return torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self, False)  # type: ignore[no-untyped-call]


def _sent(storage: _Watched) -> tuple[Any, ...]:
    """Send a storage to another process, as a plain one."""
    rebuild, (_, *more) = reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
    return rebuild, (torch.UntypedStorage, *more)


ForkingPickler.register(_Watched, _sent)


def _finalizer_of(
    reference: weakref.ref[torch.UntypedStorage], listeners: list[weakref.ref[ReleaseListener]]
) -> Generator[None, None, None]:
    waiting, tries = True, 0
    while tries < _TRIES:
        try:
            if waiting:
                waiting = False
                yield
            _hand_over(reference(), listeners)
            break
        except GeneratorExit:  # the storage is gone already
            return
        except BaseException as error:  # Ctrl-C, or what another signal handler raised
            interruptions.append(error)
            tries += 1
    yield


def _hand_over(storage: torch.UntypedStorage | None, listeners: list[weakref.ref[ReleaseListener]]) -> None:
    if storage is None:
        return
    while listeners:
        listener = listeners[-1]()
        if listener is not None:
            _ended.append((listener, storage))
        listeners.pop()
    if not _here.depth:
        with working:
            pass


# When not to work at once.

_ended: deque[tuple[ReleaseListener, torch.UntypedStorage]] = deque()
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
                    listener, storage = _ended.popleft()
                except IndexError:  # another thread was faster
                    break
                try:
                    listener.on_release(storage)
                except BaseException:
                    _ended.appendleft((listener, storage))
                    raise
                finally:
                    del listener, storage
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
