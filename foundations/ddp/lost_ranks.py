"""Which rank is gone, where torch's error says of a connection that it was closed."""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["RankLostError", "RankProcesses", "end_of_process", "is_lost_message", "machine"]

_PATIENCE_MS = 2000
"""A process closes its connections a moment before it has ended."""
_LOST = ("connection", "timed out", "timeout", "peer", "socket", "broken pipe")


class RankLostError(RuntimeError):
    """Another rank did not send what it should have: it ended, failed, or is late."""


def is_lost_message(error: BaseException) -> bool:
    """Whether torch's error says that a message of another rank did not come."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


def machine() -> str:
    """The same for all processes that can share memory: of one start of one system, and of one view of its processes.

    Processes in other network namespaces, as containers have, count as other machines: they share nothing else either.
    """
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id",):
        with suppress(OSError):
            parts.append(Path(path).read_text().strip())
    for name in ("pid", "net"):
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    return " ".join(parts)


def end_of_process(process: int) -> int:
    """A descriptor that can be read when a process has ended; -1 where the kernel has none."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(process)
    return -1


class RankProcesses:
    """The processes of all ranks; each of them makes one of these, and closes it.

    Args:
        group: whose ranks; None: all.
    """

    def __init__(self, group: Any = None) -> None:
        here = machine()
        processes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(processes, (here, os.getpid()), group=group)
        ranks = dist.get_process_group_ranks(group)
        self._names = {
            rank: f"rank {rank} (process {process})"
            for rank, (_, process) in zip(ranks, processes, strict=True)
            if rank != dist.get_rank()
        }
        self._ends = {
            end: rank
            for rank, (where, process) in zip(ranks, processes, strict=True)
            if rank in self._names and where == here and (end := end_of_process(process)) >= 0
        }

    def explain(self, error: BaseException) -> str | None:
        """Which rank was lost, if that is what torch's error is about; those of other machines are not seen to end."""
        text = str(error)
        _, named, inner = text.partition(f"{RankLostError.__name__}: ")
        if named:  # ours, as a callback of torch's passes it on
            return inner.partition("\n\nAt:")[0]
        if isinstance(error, RankLostError) or not is_lost_message(error):
            return None
        poll = select.poll()
        for end in self._ends:
            poll.register(end, select.POLLIN)
        ended = [self._names[self._ends[end]] for end, _ in poll.poll(_PATIENCE_MS)] if self._ends else []
        if not ended and not any(backend in text.lower() for backend in ("gloo", "nccl")):
            return None
        names = list(self._names.values())
        whose = f"{' and '.join(ended)} ended" if ended else f"{' or '.join(names)} failed or ended"
        return f"{whose}; see its own error, or what killed it ({text})"

    def close(self) -> None:
        """Give the descriptors back."""
        ends, self._ends = self._ends, {}
        for end in ends:
            os.close(end)
