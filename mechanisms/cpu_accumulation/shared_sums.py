"""Sums in the memory of hosts: shared within a machine, through a process group between machines."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from retime.foundations.ddp import RankLostError, close_group, end_of_process, machine, own_group
from retime.foundations.native import NoLibraryError, Source

# Sums over the ranks of one machine, in memory that they share.

_CHUNK_BYTES, _ALL_CHUNKS_BYTES = 2**17, 2**18
_PAGE = 2**12

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_ENDED, _LATE, _STOPPED, _UNEVEN = 1, 2, 3, 5


@dataclass(frozen=True)
class SumTimes:
    """Time that sums took on this rank, by part, in milliseconds."""

    bring: float
    """Values copied into shared memory, for the ranks that add them up."""
    add: float
    """This rank's share added up."""
    take: float
    """Sums that others made copied out of shared memory."""
    wait: float
    """Asleep until other ranks have done their part."""


def default_chunk_bytes(ranks: int) -> int:
    """Return the bytes that one rank adds up at a time: what many ranks share must fit into the caches too."""
    return max(_PAGE, min(_CHUNK_BYTES, _ALL_CHUNKS_BYTES // ranks // _PAGE * _PAGE))


def shared_bytes(library: ctypes.CDLL, ranks: int, chunk_bytes: int) -> int:
    """Memory that so many ranks share."""
    return int(library.retime_sums_bytes(ranks, chunk_bytes))


class SharedSum:
    """This rank's part in the sums of one machine; all of its ranks call the same ones in the same order.

    The paper adds in the order of arrival, in a critical section (Sekiyama et al. 2017, Algorithm 7), so that results
    differ from run to run. Here each element is added up in the order of the ranks, by one of them.

    Args:
        library: of :func:`~retime.mechanisms.cpu_accumulation.shared_sums.sums_library`.
        file: descriptor of the shared memory, of :func:`shared_bytes` bytes that were 0 at first.
        rank: which of the processes this is.
        processes: their ids.
        names: the ranks' names in errors.
        timeout: how long another rank may take.
        chunk_bytes: a multiple of 64; the same on all.

    Attributes:
        rank: of this process, on this machine.
        ranks: how many there are on this machine.
        timeout: how long another rank may take from now on.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        file: int,
        rank: int,
        processes: Sequence[int],
        names: Sequence[int],
        timeout: timedelta,
        chunk_bytes: int,
    ) -> None:
        self._library, self._names, self._processes = library, list(names), list(processes)
        self.timeout = timeout
        self.rank, self.ranks = rank, len(processes)
        self._nanoseconds: ctypes.Array[ctypes.c_int64] | None = None
        self._ends = [-1 if other == rank else end_of_process(process) for other, process in enumerate(processes)]
        ends = (ctypes.c_int * len(self._ends))(*self._ends)
        self._sums = library.retime_sums_open(file, rank, len(processes), chunk_bytes, ends)
        if not self._sums:
            self._forget()
            raise OSError("the shared memory cannot be mapped")

    def add(self, values: Tensor, scale: float = 1.0) -> None:
        """Replace ``values``, shape ``(n,)``, contiguous, by their sum; half precision is added up in float32.

        Args:
            values: of this rank.
            scale: each rank's values are multiplied by it first.

        Raises:
            RankLostError: another rank ended, failed, or is late.
            RuntimeError: ranks bring different numbers of values, or of other types.
            TypeError: there are no sums of this dtype.
        """
        self._run(values, -1, scale)

    def broadcast(self, values: Tensor, root: int) -> None:
        """Replace ``values`` by those of a rank, counted within the machine."""
        self._run(values, root)

    def _run(self, values: Tensor, root: int, scale: float = 1.0) -> None:
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.dtype not in _DTYPES:
            raise TypeError(f"gradients of {values.dtype} cannot be summed in shared memory: use reduce_on='device'")
        if not values.is_contiguous():
            raise ValueError("values to sum must be contiguous")
        if not self._sums:
            raise RuntimeError("sums in shared memory were closed")
        who = ctypes.c_int()
        timeout_ms = max(1, int(self.timeout.total_seconds() * 1000))
        outcome = self._library.retime_sums_run(
            self._sums,
            values.data_ptr(),
            values.numel(),
            _DTYPES[values.dtype],
            scale,
            root,
            timeout_ms,
            ctypes.byref(who),
        )
        if outcome == _UNEVEN:
            raise RuntimeError(self._uneven())
        if outcome:
            raise RankLostError(self._told(outcome, who.value))

    def _told(self, outcome: int, who: int) -> str:
        if outcome == _STOPPED:
            return "sums in shared memory were stopped on this rank"
        rank = self._named(who)
        if outcome == _ENDED:
            return f"{rank} ended before it brought its gradients; see its own error, or what killed it"
        if outcome == _LATE:
            seconds = self.timeout.total_seconds()
            return f"{rank} has not brought its gradients for {seconds:g} s: it hangs, or needs a longer timeout"
        return f"{rank} failed or ended before it brought its gradients; see its own error, or what killed it"

    def _named(self, rank: int) -> str:
        return f"rank {self._names[rank]} (process {self._processes[rank]})"

    def _uneven(self) -> str:
        two = (ctypes.c_int64 * 8)()
        self._library.retime_sums_differ(self._sums, two)
        texts = []
        for rank, count, dtype, root in (two[:4], two[4:]):
            what = "to the sum" if root < 0 else f"for a copy of rank {self._names[root]}'s"
            texts.append(f"{self._named(rank)} brings {count} values of {list(_DTYPES)[dtype]} {what}")
        return (
            f"{', but '.join(texts)}: let all ranks sum tensors of the same sizes in the same order; if one of them "
            "has failed, see its own error"
        )

    def times(self) -> SumTimes:
        """Return the times of the sums since the last call; they are timed from the first call on."""
        if self._nanoseconds is None:
            self._nanoseconds = (ctypes.c_int64 * 4)()
            self._library.retime_sums_time(self._sums, self._nanoseconds)
        times = SumTimes(*(nanoseconds / 1e6 for nanoseconds in self._nanoseconds))
        for phase in range(len(self._nanoseconds)):
            self._nanoseconds[phase] = 0
        return times

    def stop(self) -> None:
        """Let a sum that another thread runs end, here and on all other ranks, with an error that names this one."""
        if self._sums:
            self._library.retime_sums_fail(self._sums)
            self._library.retime_sums_stop(self._sums)

    def close(self) -> None:
        """Give the memory back; when no sum runs."""
        sums, self._sums = self._sums, None
        if sums:
            self._library.retime_sums_close(sums)
        self._forget()

    def _forget(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            if end >= 0:
                os.close(end)


# Memory without a name that the processes of one machine share: nothing is left of it when the last of them ends.


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
        shared = cls(os.memfd_create("retime-sums", os.MFD_CLOEXEC))
        try:
            os.posix_fallocate(shared.file, 0, size)
        except BaseException:
            shared.close()
            raise
        return shared

    @property
    def path(self) -> str:
        """Path by which other processes of this machine find it, as long as this one has it open."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @classmethod
    def find(cls, path: str) -> SharedFile:
        """Open what another process has made.

        Raises:
            OSError: it cannot be reached from here.
        """
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def close(self) -> None:
        """Give the descriptor back; what is mapped stays."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


# The sums' machine code.


def _declare(library: ctypes.CDLL) -> None:
    pointer, int32, int64, double = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
    library.retime_sums_bytes.argtypes = [int32, int64]
    library.retime_sums_bytes.restype = int64
    library.retime_sums_open.argtypes = [int32, int32, int32, int64, ctypes.POINTER(int32)]
    library.retime_sums_open.restype = pointer
    run = library.retime_sums_run
    run.argtypes = [pointer, pointer, int64, int32, double, int32, int64, ctypes.POINTER(int32)]
    library.retime_sums_time.argtypes = [pointer, ctypes.POINTER(int64)]
    library.retime_sums_differ.argtypes = [pointer, ctypes.POINTER(int64)]
    for name in ("stop", "fail", "close"):
        getattr(library, f"retime_sums_{name}").argtypes = [pointer]


SUMS = Source(
    "sums",
    "sums in shared memory",
    Path(__file__).parent,
    "shared_sum.cpp",
    _declare,
    ("-O3", "-ffp-contract=off"),
    links_torch=False,  # numbers of 16 bits are in its headers alone
)


@cache
def sums_library() -> ctypes.CDLL | NoLibraryError:
    """The library, or the reason why there is none."""
    return SUMS.library()


T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)


class GlooSums:
    """Sums through a process group, where memory cannot be shared; one at a time, in the same order on all ranks.

    Args:
        group: of the gloo backend; closed with this.
        note: why, for reports.

    Attributes:
        shared: the sum of this machine's ranks alone; None: they share no memory.
    """

    shared: SharedSum | None = None

    def __init__(self, group: Any, note: str) -> None:
        self._group, self.note = group, note

    def add(self, values: Tensor, scale: float = 1.0) -> None:
        """Replace ``values``, shape ``(n,)``, by their sum, each rank's times ``scale``; half precision in float32."""
        if scale != 1:
            values.mul_(scale)
        _all_reduce(values, self._group)

    def times(self) -> SumTimes | None:
        """Time of sums by part since the last call, from the first one on; gloo does not tell."""
        return None

    def stop(self) -> bool:
        """After a failure: whether a sum that another thread runs is sure to end now; the group has its own timeout."""
        return False

    def close(self, *, running: bool = False) -> None:
        """Give the group back; ``running``: a sum may still run, which :meth:`stop` could not end."""
        group, self._group = self._group, None
        close_group(group)


class MachineSums:
    """The same in shared memory within each machine; one rank of each then adds up over the machines.

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
        """Return the times of this machine's sums."""
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


HostSums = GlooSums | MachineSums


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
        chunk_bytes, own = 0, None
        if local[0] == me:
            own, chunk_bytes, why_not = _made(library, len(local))
            if own is not None:
                files.callback(own.close)
        offers = _gathered((own.path if own else "", chunk_bytes, why_not), control)
        path, chunk_bytes, why_not = offers[local[0]]
        shared = None
        if not why_not:
            try:
                file = own or SharedFile.find(path)
                files.callback(file.close)
                processes = [ranks[rank].process for rank in local]
                names = [dist.get_global_rank(control, rank) for rank in local]
                place = local.index(me)
                shared = SharedSum(library, file.file, place, processes, names, timeout or _TIMEOUT, chunk_bytes)
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
            if chunk_bytes <= _PAGE:
                return None, chunk_bytes, f"no {wanted} bytes of shared memory for {ranks} ranks: {error}"
            chunk_bytes = max(_PAGE, chunk_bytes // _PAGE // 4 * _PAGE)


def _gathered(mine: T, group: Any) -> list[T]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _all_reduce(values: Tensor, group: Any) -> None:
    if values.dtype in (torch.float16, torch.bfloat16):
        wide = values.float()
        dist.all_reduce(wide, group=group)
        values.copy_(wide)
    else:
        dist.all_reduce(values, group=group)
