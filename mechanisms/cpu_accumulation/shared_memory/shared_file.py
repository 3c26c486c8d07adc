"""Memory without a name that the processes of one machine share: nothing is left of it when the last of them ends."""

from __future__ import annotations

import errno
import os

import psutil

__all__ = ["SharedFile"]


class SharedFile:
    """An anonymous file in memory, opened by others through the process that made it.

    It has no name in ``/dev/shm``, so that neither a killed process leaves it behind nor the size of that folder limits
    it.

    Args:
        file: its descriptor, closed with this.
    """

    def __init__(self, file: int) -> None:
        self.file = file

    @classmethod
    def make(cls, size: int) -> SharedFile:
        """One of ``size`` bytes, which are there from the start.

        Raises:
            OSError: there is no memory for it.
        """
        available = psutil.virtual_memory().available
        if size > available:  # the kernel would end processes to find it
            raise OSError(errno.ENOMEM, f"{size} bytes are wanted and {available} are available")
        made = cls(os.memfd_create("retime-sums", os.MFD_CLOEXEC))
        try:
            os.posix_fallocate(made.file, 0, size)
        except BaseException:
            made.close()
            raise
        return made

    @property
    def path(self) -> str:
        """Where other processes of this machine find it, as long as this one has it open."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @classmethod
    def find(cls, path: str) -> SharedFile:
        """What another process has made.

        Raises:
            OSError: it cannot be reached from here.
        """
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def close(self) -> None:
        """Give the descriptor back; what is mapped stays."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)
