"""What ranks tell each other beside gradients: what each decides by itself and all must know, and which rank is gone.

Where torch's error says of a connection that it was closed, processes are looked at.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from retime.foundations.ddp.comm_hook import close_group, own_group
from retime.schedules.budget import BudgetError

T = TypeVar("T")


class RankAgreement:
    """Small collectives that all ranks call the same number of times.

    Args:
        timeout: how long the others may take, a rank that plans included; None is torch's default.
        group: whose ranks agree, in this group, which stays its owner's; None: all ranks, on the CPU.
    """

    def __init__(self, timeout: timedelta | None = None, *, group: Any = None) -> None:
        gloo = dist.get_backend(group) == "gloo"
        self._own = None if gloo or group is not None else own_group(backend="gloo", timeout=timeout)
        self._group = self._own if group is None else group
        self._on_device = group is not None and not gloo

    def close(self) -> None:
        """Give back what was made for this; the ranks agree on nothing more."""
        own, self._own, self._group = self._own, None, None
        close_group(own)

    def largest(self, decide: Callable[[], float], doing: str) -> float:
        """The largest of the ranks' decisions, of which all get the same number.

        Args:
            decide: this rank's own; whole numbers up to 2**53 come back as they are.
            doing: what that is, for the other ranks' error: ``"plan its batch"``.

        Raises:
            Exception: what ``decide`` raised on this rank.
            BudgetError: another rank refused its budget.
            RuntimeError: ``decide`` failed otherwise on another rank.
        """
        failure: Exception | None = None
        decided = 0.0
        try:
            decided = float(decide())
        except Exception as error:  # the others wait for this rank
            failure = error
        device = torch.cuda.current_device() if self._on_device else "cpu"
        decision = torch.tensor([decided, failure is not None], dtype=torch.float64, device=device)
        dist.all_reduce(decision, dist.ReduceOp.MAX, group=self._group)
        if decision[1]:
            self._raise(failure, doing)
        return float(decision[0])

    def each_makes(self, make: Callable[[], T], undo: Callable[[T], Any], doing: str) -> T:
        """Return what ``make`` made here; undone if it failed on another rank, and this is closed if it failed on any.

        Raises:
            Exception: as :meth:`largest`.
        """
        objects: list[T] = []

        def note() -> int:
            objects.append(make())
            return 0

        try:
            self.largest(note, doing)
        except Exception:
            for one in objects:
                undo(one)
            self.close()
            raise
        return objects[0]

    def _raise(self, failure: Exception | None, doing: str) -> None:
        failures: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(failures, None if failure is None else _told(failure), group=self._group)
        if failure is not None:
            raise failure
        rank, details = next((rank, details) for rank, details in enumerate(failures) if details is not None)
        if "floor_bytes" in details:
            raise BudgetError(f"rank {rank} refuses its budget", **details)
        raise RuntimeError(f"rank {rank} could not {doing}, see that rank's error: {details['error']}")


def _told(error: Exception) -> dict[str, Any]:
    if isinstance(error, BudgetError):
        return {name: getattr(error, name) for name in ("floor_bytes", "task", "layer", "hint")}
    return {"error": f"{type(error).__name__}: {error}"}


# Which rank is gone.

_PATIENCE_MS = 2000
"""A process closes its connections a moment before it has ended."""
_PASSED_ON_S = 5.0
"""What a rank sent before it ended is passed on by others meanwhile, in sums over three ranks and more."""
_LOST = ("connection", "timed out", "timeout", "peer", "socket", "broken pipe")


class RankLostError(RuntimeError):
    """Another rank did not send what it should have: it ended, failed, or is late."""


def is_lost_message(error: BaseException) -> bool:
    """Return whether torch's error says that a message of another rank did not come."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


def machine() -> str:
    """The same for all processes that can share memory: of one start of one system, and of one view of its processes.

    Processes in other network namespaces, as containers have, count as other machines: they share nothing else either.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
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
        here, ranks = machine(), dist.get_process_group_ranks(group)
        processes: list[Any] = [None] * len(ranks)
        dist.all_gather_object(processes, (here, os.getpid()), group=group)
        others = [one for one in zip(ranks, processes, strict=True) if one[0] != dist.get_rank()]
        self._ended_at = 0.0
        self._names = {rank: f"rank {rank} (process {process})" for rank, (_, process) in others}
        self._ends = {
            end: rank for rank, (where, process) in others if where == here and (end := end_of_process(process)) >= 0
        }

    def explain(self, error: BaseException) -> str | None:
        """Name the rank that was lost, if torch's error is about that; those of other machines are not seen to end."""
        text = str(error)
        _, named, inner = text.partition(f"{RankLostError.__name__}: ")
        if named:  # ours, as a callback of torch's passes it on
            return inner.partition("\n\nAt:")[0]
        if isinstance(error, RankLostError) or not is_lost_message(error):
            return None
        ended = self._ended(_PATIENCE_MS)
        if not ended and not any(backend in text.lower() for backend in ("gloo", "nccl")):
            return None
        names = list(self._names.values())
        whose = f"{' and '.join(ended)} ended" if ended else f"{' or '.join(names)} failed or ended"
        return f"{whose}; see its own error, or what killed it ({text})"

    def check(self) -> None:
        """Ask now and then where a message may not come: gloo ends none that was half sent when its rank ended.

        Raises:
            RankLostError: the process of another rank was seen to have ended a while ago; others may have needed that
                while to pass on what it sent. Those of other machines are not seen to end.
        """
        ended = self._ended(0)
        if ended:
            self._ended_at = self._ended_at or time.monotonic()
            if time.monotonic() - self._ended_at < _PASSED_ON_S:
                return
            raise RankLostError(f"{' and '.join(ended)} ended; see its own error, or what killed it")

    def _ended(self, patience_ms: int) -> list[str]:
        poll = select.poll()
        for end in self._ends:
            poll.register(end, select.POLLIN)
        return [self._names[self._ends[end]] for end, _ in poll.poll(patience_ms)] if self._ends else []

    def close(self) -> None:
        """Give the descriptors back."""
        ends, self._ends = self._ends, {}
        for end in ends:
            os.close(end)
