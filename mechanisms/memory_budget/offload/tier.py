"""Where offloaded storages go: the protocol of a host tier, and its error."""

from __future__ import annotations

import errno
import weakref
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch

# What objects leave to be done when they have ended, done at the next occasion.
#
# A finaliser of Python's would do it at once, but an exception that a signal handler raises in one, Ctrl-C's say, is
# printed and lost; and it may run in the middle of anything, on any thread. Here only a queue is appended to, in C.


class _Will(weakref.ref[object]):
    __slots__ = ("then",)
    then: Callable[[], object]


class Finalizers:
    """Things to do when objects have ended."""

    def __init__(self) -> None:
        self._wills: dict[int, _Will] = {}
        self._due: deque[weakref.ref[object]] = deque()

    def when_gone(self, owner: object, then: Callable[[], object]) -> None:
        """Do this at the first :meth:`see_to` after ``owner``'s end; ``then`` must not hold it."""
        will = _Will(owner, self._due.append)
        will.then = then
        self._wills[id(will)] = will

    def see_to(self) -> None:
        """Do what is due. One that is interrupted is done again: twice must be as good as once."""
        while self._due:
            will = self._due[0]
            if id(will) in self._wills:
                self._wills[id(will)].then()
                del self._wills[id(will)]
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
        """Whether storages on that device can be moved here."""

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
