"""Sums over the ranks of one machine, in memory that they share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from retime.foundations.ddp import RankLostError, end_of_process

__all__ = ["SharedSum", "SumTimes", "default_chunk_bytes", "shared_bytes"]

_CHUNK_BYTES, _ALL_CHUNKS_BYTES = 2**17, 2**18
_PAGE = 2**12

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_ENDED, _LATE, _STOPPED, _UNEVEN = 1, 2, 3, 5


@dataclass(frozen=True)
class SumTimes:
    """Where the time of sums went on this rank, in milliseconds."""

    bring: float
    """Values copied into shared memory, for the ranks that add them up."""
    add: float
    """This rank's share added up."""
    take: float
    """Sums that others made copied out of shared memory."""
    wait: float
    """Asleep until other ranks have done their part."""


def default_chunk_bytes(ranks: int) -> int:
    """Of a block that one rank adds up at a time: what many ranks share must fit into the processors' caches too."""
    return max(_PAGE, min(_CHUNK_BYTES, _ALL_CHUNKS_BYTES // ranks // _PAGE * _PAGE))


def shared_bytes(library: ctypes.CDLL, ranks: int, chunk_bytes: int) -> int:
    """Memory that so many ranks share."""
    return int(library.retime_sums_bytes(ranks, chunk_bytes))


class SharedSum:
    """This rank's part in the sums of one machine; all of its ranks call the same ones in the same order.

    The paper adds in the order of arrival, in a critical section (Sekiyama et al. 2017, Algorithm 7), so that results
    differ from run to run. Here each element is added up in the order of the ranks, by one of them.

    Args:
        library: of :func:`~retime.mechanisms.cpu_accumulation.shared_memory.library.sums_library`.
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
        told = []
        for rank, count, dtype, root in (two[:4], two[4:]):
            what = "to the sum" if root < 0 else f"for a copy of rank {self._names[root]}'s"
            told.append(f"{self._named(rank)} brings {count} values of {list(_DTYPES)[dtype]} {what}")
        return (
            f"{', but '.join(told)}: let all ranks sum tensors of the same sizes in the same order; if one of them has "
            "failed, see its own error"
        )

    def times(self) -> SumTimes:
        """Of the sums since the last call; they are timed from the first call on."""
        if self._nanoseconds is None:
            self._nanoseconds = (ctypes.c_int64 * 4)()
            self._library.retime_sums_time(self._sums, self._nanoseconds)
        found = SumTimes(*(nanoseconds / 1e6 for nanoseconds in self._nanoseconds))
        for phase in range(len(self._nanoseconds)):
            self._nanoseconds[phase] = 0
        return found

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
