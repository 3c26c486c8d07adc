"""Sums in the memory of hosts: shared within a machine, through a process group between machines."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from retime.foundations.ddp import close_group, machine, own_group
from retime.foundations.native import NoLibraryError
from retime.mechanisms.cpu_accumulation.shared_memory.library import sums_library
from retime.mechanisms.cpu_accumulation.shared_memory.shared_file import SharedFile
from retime.mechanisms.cpu_accumulation.shared_memory.shared_sum import (
    SharedSum,
    SumTimes,
    default_chunk_bytes,
    shared_bytes,
)

__all__ = ["GlooSums", "HostSums", "MachineSums", "host_sums"]

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)
_LEAST_CHUNK_BYTES = 2**12


class HostSums(Protocol):
    """Adds tensors in host memory up over the ranks; one at a time, in the same order on all of them."""

    note: str
    """How, for reports."""

    @property
    def shared(self) -> SharedSum | None:
        """Of this machine's ranks alone; None: they share no memory."""

    def add(self, values: Tensor, scale: float = 1.0) -> None:
        """Replace ``values``, shape ``(n,)``, by their sum, each rank's times ``scale``."""

    def times(self) -> SumTimes | None:
        """Where the time of sums went since the last call, from the first one on; None where nobody can tell."""

    def stop(self) -> bool:
        """After a failure: whether a sum that another thread runs is sure to end now, with an error."""

    def close(self, *, running: bool = False) -> None:
        """Give back what was made for this.

        Args:
            running: a sum may still run, which :meth:`stop` could not end.
        """


class GlooSums:
    """Through a process group, where memory cannot be shared.

    Args:
        group: of the gloo backend; closed with this.
        note: why.
    """

    shared = None

    def __init__(self, group: Any, note: str) -> None:
        self._group, self.note = group, note

    def add(self, values: Tensor, scale: float = 1.0) -> None:
        """By an all-reduce; half precision in float32."""
        if scale != 1:
            values.mul_(scale)
        _all_reduce(values, self._group)

    def times(self) -> SumTimes | None:
        """gloo does not tell."""
        return None

    def stop(self) -> bool:
        """The group's own timeout ends it."""
        return False

    def close(self, *, running: bool = False) -> None:
        """Give the group back."""
        group, self._group = self._group, None
        close_group(group)


class MachineSums:
    """In shared memory within each machine; one rank of each then adds up over the machines.

    Args:
        shared: of this machine's ranks.
        control: all ranks' group; closed with this.
        leaders: the group of the machines' first ranks, on those, if there are several machines; closed with this.
        machines: how many there are.
    """

    def __init__(self, shared: SharedSum, control: Any, leaders: Any, machines: int) -> None:
        self.shared, self._control, self._leaders, self._machines = shared, control, leaders, machines
        among = "" if machines == 1 else f", {machines} machines through gloo"
        self.note = f"{shared.ranks} ranks in shared memory{among}"

    def add(self, values: Tensor, scale: float = 1.0) -> None:
        """Replace ``values`` by their sum over all ranks."""
        self.shared.add(values, scale)
        if self._machines > 1:
            if self._leaders is not None:
                _all_reduce(values, self._leaders)
            self.shared.broadcast(values, 0)

    def times(self) -> SumTimes | None:
        """Of this machine's sums."""
        return self.shared.times()

    def stop(self) -> bool:
        """Ends a sum of this machine; one between machines ends by its timeout."""
        self.shared.stop()
        return self._machines == 1

    def close(self, *, running: bool = False) -> None:
        """Give memory and groups back; memory that a sum may still use goes with the process."""
        if not running:
            self.shared.close()
        groups, self._leaders, self._control = (self._leaders, self._control), None, None
        for group in groups:
            close_group(group)


@dataclass(frozen=True)
class _Here:
    machine: str
    process: int
    why_not: str


def host_sums(group: Any = None, timeout: timedelta | None = None) -> HostSums:
    """The fastest that all ranks can do; each of them calls this.

    Args:
        group: whose ranks; None: all.
        timeout: how long another rank may take; None is torch's default.
    """
    control = own_group(group, backend="gloo", timeout=timeout)
    library = sums_library()
    why_not = str(library) if isinstance(library, NoLibraryError) else ""
    ranks = _gathered(_Here(machine(), os.getpid(), why_not), control)
    reason = next((f"rank {rank}: {one.why_not}" for rank, one in enumerate(ranks) if one.why_not), "")
    if reason:
        return GlooSums(control, f"through gloo ({reason})")
    assert not isinstance(library, NoLibraryError)
    machines = list(dict.fromkeys(one.machine for one in ranks))
    if len(machines) == len(ranks):
        return GlooSums(control, "through gloo (each rank is on a machine of its own)")
    me = dist.get_rank(control)
    local = [rank for rank, one in enumerate(ranks) if one.machine == ranks[me].machine]
    with ExitStack() as files:
        chunk_bytes, made = 0, None
        if local[0] == me:
            made, chunk_bytes, why_not = _made(library, len(local))
            if made is not None:
                files.callback(made.close)
        offers = _gathered((made.path if made else "", chunk_bytes, why_not), control)
        path, chunk_bytes, why_not = offers[local[0]]
        shared = None
        if not why_not:
            try:
                found = made or SharedFile.find(path)
                files.callback(found.close)
                processes = [ranks[rank].process for rank in local]
                names = [dist.get_global_rank(control, rank) for rank in local]
                place = local.index(me)
                shared = SharedSum(library, found.file, place, processes, names, timeout or _TIMEOUT, chunk_bytes)
            except OSError as error:
                why_not = f"memory that {path} stands for cannot be shared: {error}"
        reasons = _gathered(why_not, control)  # before the one who made it closes it
    reason = next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")
    if reason or shared is None:
        if shared is not None:
            shared.close()
        return GlooSums(control, f"through gloo ({reason})")
    leaders = None
    if len(machines) > 1 and local[0] == me:
        first = [next(rank for rank, one in enumerate(ranks) if one.machine == name) for name in machines]
        names = [dist.get_global_rank(control, rank) for rank in first]
        leaders = dist.new_group(names, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return MachineSums(shared, control, leaders, len(machines))


def _made(library: Any, ranks: int) -> tuple[SharedFile | None, int, str]:
    """Shared memory, with smaller chunks where there is little; or why there is none."""
    chunk_bytes = default_chunk_bytes(ranks)
    while True:
        wanted = shared_bytes(library, ranks, chunk_bytes)
        try:
            return SharedFile.make(wanted), chunk_bytes, ""
        except OSError as error:
            if chunk_bytes <= _LEAST_CHUNK_BYTES:
                return None, chunk_bytes, f"no {wanted} bytes of shared memory for {ranks} ranks: {error}"
            chunk_bytes = max(_LEAST_CHUNK_BYTES, chunk_bytes // 4096 // 4 * 4096)


def _gathered(mine: T, group: Any) -> list[T]:
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return told


def _all_reduce(values: Tensor, group: Any) -> None:
    if values.dtype in (torch.float16, torch.bfloat16):
        wide = values.float()
        dist.all_reduce(wide, group=group)
        values.copy_(wide)
    else:
        dist.all_reduce(values, group=group)
