"""Where offloaded storages go: the protocol of a host tier, its error, and the text that names one."""

from __future__ import annotations

import errno
import tempfile
from typing import Protocol

import torch


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

    name: str

    def takes(self, device: torch.device) -> bool:
        """Whether storages on that device can be moved here."""

    def reserve(self, nbytes: int, storages: int) -> None:
        """Have space for so many bytes in so many storages at once, so that a full host shows before a step begins.

        Raises:
            HostError: there is no such space.
        """

    def store(self, source: torch.UntypedStorage) -> HostCopy:
        """Start to copy a storage out.

        Raises:
            HostError: there is no space.
        """

    def bytes_held(self) -> int:
        """Bytes of all copies that were not freed."""

    def close(self) -> None:
        """Give back space, threads and files. Doing so twice is harmless."""


class HostNone:
    """Takes nothing: for steps under which no saved-tensor hooks can be, so that nobody knows what they save."""

    name = "none"

    def takes(self, device: torch.device) -> bool:
        return False

    def reserve(self, nbytes: int, storages: int) -> None:
        """Nothing comes."""

    def store(self, source: torch.UntypedStorage) -> HostCopy:
        raise HostError(errno.ENOSYS, "this step's tensors cannot be offloaded")

    def bytes_held(self) -> int:
        return 0

    def close(self) -> None:
        pass


def check_host(host: object) -> None:
    """Raise what to give instead of something that holds no storages.

    Raises:
        TypeError: it is no host tier.
    """
    if not callable(getattr(host, "store", None)):
        given = f"parse_host({host!r}, device)" if isinstance(host, str) else "what parse_host() returns"
        raise TypeError(f"host={host!r} is no host tier: give {given}")


def check_host_text(text: str | None) -> None:
    """Refuse what names no tier for any device, before the device is known.

    Raises:
        TypeError: no text, and not None.
        ValueError: it names no tier.
    """
    if not isinstance(text, str | None):
        raise TypeError(f"host={text!r} must be a text: use 'memory' or 'disk:FOLDER'")
    if text not in (None, "memory") and not (text.startswith("disk:") and text != "disk:"):
        raise ValueError(f"host={text!r} names no place for offloaded tensors: use 'memory' or 'disk:FOLDER'")


def parse_host(text: str | None, device: torch.device | str, capacity_bytes: int | str = 0) -> HostTier:
    """The host tier that ``host=text`` means for training on ``device``.

    Args:
        text: ``"memory"``: CPU memory, for CUDA devices. ``"disk:FOLDER"``: a file there, for training on the CPU.
            None: memory for CUDA, the folder for temporary files otherwise.
        device: where the step computes.
        capacity_bytes: space to reserve on a disk at once, so that a full disk shows before the first step; or a text
            such as ``"1GiB"``.

    Raises:
        TypeError: no text, and not None.
        ValueError: the text names no tier, or one that is no use for the device.
        HostError: the folder is missing, cannot be written to, or has not the space.
    """
    from retime.mechanisms.memory.host.disk import HostDisk
    from retime.mechanisms.memory.host.pinned import HostMemory

    check_host_text(text)
    device = torch.device(device)
    if text is None:
        text = "memory" if device.type != "cpu" else f"disk:{tempfile.gettempdir()}"
    if text != "memory":
        return HostDisk(text.removeprefix("disk:"), device=device, capacity_bytes=capacity_bytes)
    if device.type == "cpu":
        raise ValueError("host='memory' frees nothing when the model trains on the CPU: use host='disk:FOLDER'")
    return HostMemory(device)
