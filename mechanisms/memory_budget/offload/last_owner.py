"""Storages that are handed over once their last owner has let go of them: from then on nothing can write into them.

Autograd's version counters do not tell of every write. Parts that ``unsafe_chunk`` cuts (so do the kernels of GRU and
LSTM) share a storage, and each has a counter of its own; so has what ``.data`` gives, and a NumPy array has none. What
is copied while anybody still holds the storage may be out of date when it comes back; what is copied afterwards cannot.

The storage is caught at its end by ``__del__``, which Python allows to keep the object. An exception that a signal
handler raises there, Ctrl-C's say, would be printed and lost, so no function of Python's begins there: a generator goes
on, whose ``try`` is open already.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, Protocol, cast

import torch
from torch.multiprocessing import reductions

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
