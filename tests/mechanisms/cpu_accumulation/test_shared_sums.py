"""Sums in shared memory: the ranks are threads of one process here, each with a mapping of its own."""

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retime.foundations.ddp import RankLostError
from retime.foundations.native import NoLibraryError
from retime.mechanisms.cpu_accumulation.shared_sums import SharedFile, SharedSum, SumTimes, shared_bytes, sums_library
from support.time_limits import limit_s

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
CHUNK_BYTES = 256
"""So small that tensors of a few hundred elements go around the ring."""
HOLDS_S = 30


class Ranks:
    """So many ranks of one machine."""

    def __init__(self, count: int) -> None:
        library = sums_library()
        if isinstance(library, NoLibraryError):
            pytest.skip(str(library))
        file = SharedFile.make(shared_bytes(library, count, CHUNK_BYTES))
        timeout = timedelta(seconds=limit_s(HOLDS_S))
        processes = [os.getpid()] * count
        self.sums = [
            SharedSum(library, file.file, rank, processes, range(count), timeout, CHUNK_BYTES) for rank in range(count)
        ]
        file.close()

    def each(self, do: Callable[[SharedSum, int], Any]) -> list[Any]:
        """What each rank returns, or raises."""

        def tried(rank: int) -> Any:
            try:
                return do(self.sums[rank], rank)
            except RuntimeError as error:
                return error

        with ThreadPoolExecutor(len(self.sums)) as threads:
            return list(threads.map(tried, range(len(self.sums))))

    def close(self) -> None:
        for one in self.sums:
            one.close()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as ends:

        def make(count: int) -> Ranks:
            ranks = Ranks(count)
            ends.callback(ranks.close)
            return ranks

        yield make


def in_order(values: list[Tensor]) -> Tensor:
    wide = values[0].dtype if values[0].dtype.itemsize > 2 else torch.float32
    total = values[0].to(wide)
    for more in values[1:]:
        total = total + more.to(wide)
    return total.to(values[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_sum_is_that_in_the_order_of_the_ranks(ranks: Any, count: int, dtype: torch.dtype) -> None:
    these = ranks(count)
    for size in (0, 1, 15, 64, 1000, 4096, 7777):
        turn = 1 + 2j if dtype.is_complex else 1
        given = [torch.randn(size).mul(10.0 ** (rank % 3)).to(dtype).mul(turn) for rank in range(count)]
        sums = [values.clone() for values in given]
        assert these.each(lambda one, rank, sums=sums: one.add(sums[rank])) == [None] * count
        for found in sums:
            assert torch.equal(found, in_order(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.5, 0.1])
def test_scaling_has_the_bits_of_scaled_tensors(ranks: Any, scale: float, dtype: torch.dtype) -> None:
    given = [torch.randn(3001).to(dtype) for _ in range(3)]
    sums = [values.clone() for values in given]
    ranks(3).each(lambda one, rank: one.add(sums[rank], scale))
    for found in sums:
        assert torch.equal(found, in_order([values.clone().mul_(scale) for values in given]))


def test_ranks_that_come_late_change_no_bit(ranks: Any) -> None:
    these = ranks(3)
    given = [torch.randn(5000) * 10.0**rank for rank in range(3)]
    for turn in range(20):

        def add(one: SharedSum, rank: int, turn: int = turn) -> Tensor:
            threading.Event().wait(0.002 * ((rank + turn) % 3))
            values = given[rank].clone()
            one.add(values)
            return values

        for found in these.each(add):
            assert torch.equal(found, in_order(given))


def test_times_tell_work_from_waiting(ranks: Any) -> None:
    """Rank 1 comes when rank 0 has slept for a while; sums before anybody asked are in no times."""
    these, both, slept = ranks(2), threading.Barrier(2, timeout=limit_s(HOLDS_S)), [0.0, 0.0]
    values = [torch.randn(5000) for _ in range(2)]

    def timed(one: SharedSum, rank: int) -> Any:
        one.add(values[rank].clone())
        nothing = one.times()
        for _ in range(100):  # on a busy machine rank 0 may come as late
            time.sleep(rank * 0.05)
            one.add(values[rank].clone())
            times = one.times()
            slept[rank] = times.wait
            both.wait()
            if slept[0]:
                break
        return nothing, times, one.times()

    for rank, (nothing, times, after) in enumerate(these.each(timed)):
        assert nothing == after == SumTimes(0, 0, 0, 0)
        assert min(times.bring, times.add, times.take) > 0
        assert rank == 1 or times.wait > 0


@pytest.mark.parametrize("root", [0, 2])
def test_a_rank_can_give_its_values_to_all(ranks: Any, root: int) -> None:
    values = [torch.full((3000,), float(rank)) for rank in range(3)]
    values[root][0] = -0.0
    ranks(3).each(lambda one, rank: one.broadcast(values[rank], root))
    for found in values:
        assert torch.equal(found, values[root])
        assert torch.signbit(found[0])


def test_what_cannot_be_summed_is_refused(ranks: Any) -> None:
    (one,) = ranks(1).sums
    with pytest.raises(TypeError, match=r"torch.int64 cannot be summed in shared memory: use reduce_on='device'"):
        one.add(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="contiguous"):
        one.add(torch.ones(4, 4).t()[:2])
    one.close()
    with pytest.raises(RuntimeError, match="closed"):
        one.add(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5, 300, 0])
def test_ranks_that_bring_different_numbers_of_values_are_named_on_all(
    ranks: Any, size: int, dtype: torch.dtype
) -> None:
    these = ranks(3)
    these.each(lambda one, rank: one.add(torch.ones(7777)))

    def add(one: SharedSum, rank: int) -> None:
        one.add(torch.ones(size + rank // 2, dtype=dtype) if rank else torch.ones(size))
        one.add(torch.ones(9))  # so that a rank with nothing to sum meets the others

    for error in these.each(add):
        assert isinstance(error, RuntimeError)
        assert not isinstance(error, RankLostError)
        brings = rf"rank \d \(process {os.getpid()}\) brings \d+ values of torch\.float\d\d to the sum"
        assert re.search(f"{brings}, but {brings}: let all ranks sum tensors of the same sizes", str(error))


def test_a_copy_and_a_sum_are_not_the_same(ranks: Any) -> None:
    values = [torch.full((8,), float(rank)) for rank in range(2)]
    errors = ranks(2).each(lambda one, rank: one.broadcast(values[0], 0) if rank == 0 else one.add(values[1]))
    assert len(set(map(str, errors))) == 1
    assert "brings 8 values of torch.float32 for a copy of rank 0's, but rank 1" in str(errors[0])
    assert torch.equal(values[1], torch.ones(8))


def test_a_rank_that_hangs_is_named_by_all_others(ranks: Any) -> None:
    these = ranks(3)
    these.sums[0].timeout = timedelta(seconds=0.2)  # rank 2 has time enough for rank 0, which may come late
    results = these.each(lambda one, rank: None if rank == 1 else one.add(torch.ones(5)))
    who = f"rank 1 (process {os.getpid()})"
    assert list(map(str, results)) == [
        f"{who} has not brought its gradients for 0.2 s: it hangs, or needs a longer timeout",
        "None",
        f"{who} failed or ended before it brought its gradients; see its own error, or what killed it",
    ]


def test_a_rank_that_stops_ends_the_others_sums_at_once(ranks: Any) -> None:
    these = ranks(2)

    def do(one: SharedSum, rank: int) -> None:
        if rank:
            one.stop()
        else:
            one.add(torch.ones(5))

    results = these.each(do)
    assert "rank 1" in str(results[0])
    assert "failed or ended" in str(results[0])


def test_a_sum_that_runs_in_another_thread_can_be_stopped(ranks: Any) -> None:
    one = ranks(2).sums[0]
    raised: list[BaseException] = []

    def add() -> None:
        try:
            one.add(torch.ones(5))
        except RankLostError as error:
            raised.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    one.stop()
    thread.join(limit_s(HOLDS_S))
    assert not thread.is_alive()
    assert len(raised) == 1


def test_nothing_is_left_behind() -> None:
    def open_files() -> set[str]:
        return {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("retime-sums")

    Ranks(2).close()
    gc.collect()  # what earlier tests have left
    before, mapped = open_files(), maps()
    these = Ranks(3)
    these.each(lambda one, rank: one.add(torch.ones(1000)))
    assert maps() == mapped + 3
    these.close()
    assert open_files() <= before
    assert maps() == mapped
    assert not any("retime" in name for name in os.listdir("/dev/shm"))


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_memory_that_is_not_there_is_told() -> None:
    with pytest.raises(OSError, match=r".+"):
        SharedFile.make(2**60)
