"""Host tiers: where bytes go, what they say without a place or when a disk or a caller errs; places used again."""

import errno
import os
import random
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.memory_budget.offload.hosts import Extents, HostDisk, HostMemory, parse_host
from retime.mechanisms.memory_budget.offload.tier import HostError
from support.time_limits import limit_s
from support.warm_start import run_program


def storage(nbytes: int, seed: int = 0) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def contents(where: torch.UntypedStorage) -> bytes:
    return bytes(where.tolist())


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_what_comes_back_is_what_left(tmp_path: Path, tier: str) -> None:
    host = HostDisk(tmp_path) if tier == "disk" else HostMemory("cpu")
    sources = [storage(size, size) for size in (1, 4095, 4096, 4097, 100_000)]
    copies = [host.store(source) for source in sources]
    targets = [storage(source.nbytes(), 99) for source in sources]
    loads = [copy.load(target) for copy, target in zip(copies, targets, strict=True)]
    for load, copy in zip(loads, copies, strict=True):
        load.wait()
        copy.settle()
    assert [contents(target) for target in targets] == [contents(source) for source in sources]
    assert host.live_bytes() == sum(source.nbytes() for source in sources)
    for copy in copies:
        copy.free()
        copy.free()
    assert host.live_bytes() == 0
    host.close()
    host.close()


def test_space_is_reserved_before_the_first_step(tmp_path: Path) -> None:
    with HostDisk(tmp_path) as host:
        host.reserve(3_000_000, 0)
        assert os.fstat(host._file.fileno()).st_blocks * 512 >= 3_000_000
        assert os.listdir(tmp_path) == []  # the file has no name


def test_a_full_disk_says_what_to_do_and_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with HostDisk(tmp_path) as host:
        monkeypatch.setattr(os, "posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(HostError, match="raise the budget so that less is offloaded") as caught:
                host.store(storage(5000))
            assert caught.value.errno == errno.ENOSPC
        assert host.live_bytes() == 0
        with pytest.raises(HostError):
            host.reserve(1, 0)


def test_a_real_limit_on_the_file_is_an_error_of_the_forward_pass(tmp_path: Path) -> None:
    program = f"""
import resource, torch
from retime.mechanisms.memory_budget.offload.tier import HostError
from retime.mechanisms.memory_budget.offload.hosts import HostDisk
from retime.mechanisms.memory_budget.offload.saved_tensors import OffloadSavedTensors
from retime.schedules.budget import OffloadPlan
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
host = HostDisk({str(tmp_path)!r})
leaf = torch.ones(10_000, requires_grad=True)
try:
    with OffloadSavedTensors(OffloadPlan(1, frozenset(range(3)), 0, 3), host, [leaf]):
        leaf.exp().exp().exp().sum()
except HostError as error:
    print("refused", leaf.grad is None, host.live_bytes())
"""
    assert run_program(program).split() == ["refused", "True", "0"]


def test_a_folder_in_memory_is_warned_of() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no file system in memory here")
    with pytest.warns(NoEffectWarning, match="offloading there frees nothing"):
        HostDisk("/dev/shm").close()


def test_parse_host(tmp_path: Path) -> None:
    host = parse_host(f"disk:{tmp_path}", "cpu")
    assert isinstance(host, HostDisk)
    host.close()
    with pytest.raises(ValueError, match="'disk:FOLDER'"):
        parse_host("memory", "cpu")
    with pytest.raises(ValueError, match="use 'memory' or 'disk:FOLDER'"):
        parse_host("tape", "cpu")
    with pytest.raises(ValueError, match="use 'memory' or 'disk:FOLDER'"):
        parse_host("disk:", "cpu")
    with pytest.raises(ValueError, match="use host='memory'"):
        parse_host(f"disk:{tmp_path}", "cuda")
    with pytest.raises(HostError, match=r"missing.*name an existing folder") as caught:
        parse_host(f"disk:{tmp_path}/missing", "cpu")
    assert caught.value.errno == errno.ENOENT


def test_places_never_overlap_and_exact_fits_come_first() -> None:
    extents = Extents(alignment=1)
    first, second, third = extents.take(30), extents.take(10), extents.take(20)
    assert (first, second, third, extents.end) == (0, 30, 40, 60)
    extents.give_back(first, 30)
    extents.give_back(second, 10)
    assert extents.take(5) == 0  # the two were merged
    extents.give_back(third, 20)
    assert extents.take(60) == 5  # the last free place grows
    assert extents.end == 65

    extents, taken, chance = Extents(), {}, random.Random(0)
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            offset = chance.choice(list(taken))
            extents.give_back(offset, taken.pop(offset))
        else:
            size = chance.randrange(1, 50_000)
            offset = extents.take(size)
            taken[offset] = size
            inside = sorted(taken.items())
            for (start, length), (following, _) in pairwise(inside):
                assert start + length <= following


def test_an_exact_fit_is_preferred_to_an_earlier_larger_place() -> None:
    extents = Extents(alignment=1)
    places = [extents.take(size) for size in (50, 1, 20, 1)]
    extents.give_back(places[0], 50)
    extents.give_back(places[2], 20)
    assert extents.take(20) == places[2]
    assert extents.take(20) == places[0]


def test_a_disks_thread_runs_from_the_start(tmp_path: Path) -> None:
    """One that is to start when memory is used up may hang for ever."""
    before = set(threading.enumerate())
    with HostDisk(tmp_path):
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("under_way", ["write", "read"])
def test_garbage_may_be_collected_on_the_thread_that_copies(tmp_path: Path, under_way: str) -> None:
    """In a process of its own, since a thread that waits for itself would never end."""
    program = f"""
import gc, os, threading, torch
from concurrent.futures import wait
from retime.mechanisms.memory_budget.offload.hosts import HostDisk
class Cycle:
    pass
gc.disable()
host, gate, cycle = HostDisk({str(tmp_path)!r}), threading.Event(), Cycle()
collected = host._pool.submit(lambda: (gate.wait(), gc.collect(), print(host.live_bytes())))
cycle.itself, cycle.copy = cycle, host.store(torch.ones(5000).untyped_storage())
if {under_way == "read"}:
    cycle.loading = cycle.copy.load(torch.zeros(5000).untyped_storage())
del cycle
gate.set()
print("hangs" if wait([collected], {limit_s(60)}).not_done else "ended", flush=True)
os._exit(0)
"""
    assert run_program(program).split() == ["0", "ended"]


def test_a_copy_that_is_freed_early_still_ends(tmp_path: Path) -> None:
    """Nobody waits for it, the thread can go on reading from the source, and its place is written in order."""
    gate = threading.Event()
    with HostDisk(tmp_path) as host:
        host._pool.submit(gate.wait, limit_s(60))
        source = storage(10_000)
        alive = weakref.ref(source)
        copy = host.store(source)
        del source
        copy.free()
        assert host.live_bytes() == 0
        assert alive() is not None
        later, target = storage(10_000, 1), storage(10_000, 2)
        second = host.store(later)
        assert host._extents.end == Extents().rounded(10_000), "the place is used again"
        loading = second.load(target)
        gate.set()
        loading.wait()
        assert contents(target) == contents(later)
        assert alive() is None, "held although the copy has ended"


def test_a_target_that_is_dropped_early_is_held_until_it_is_filled(tmp_path: Path) -> None:
    gate = threading.Event()
    with HostDisk(tmp_path) as host:
        copy = host.store(storage(10_000))
        copy.settle()
        host._pool.submit(gate.wait, limit_s(60))
        target = storage(10_000, 1)
        alive = weakref.ref(target)
        loading = copy.load(target)
        del target, loading
        assert alive() is not None
        gate.set()
        host._pool.submit(int).result()
        assert alive() is None


def kept_bytes(host: HostMemory) -> int:
    host.live_bytes()  # counts what was freed
    return host._cached.nbytes


def test_host_memory_keeps_no_more_than_was_held_at_once() -> None:
    host = HostMemory("cpu")
    for size in range(1000, 101_000, 1000):
        copy = host.store(storage(size))
        copy.free()
        assert kept_bytes(host) <= size
    host.close()
    assert kept_bytes(host) == 0


def test_host_memory_gives_up_sizes_that_were_used_longest_ago() -> None:
    host = HostMemory("cpu")
    host.reserve(6000, 3)

    def use(*sizes: int) -> list[int]:
        copies = [host.store(storage(size)) for size in sizes]
        buffers = [copy.copied.buffer.data_ptr() for copy in copies]
        for copy in copies:
            copy.free()
        return buffers

    first, second, third = use(1000, 2000, 3000)
    assert use(1000, 2000, 3000) == [first, second, third], "a step allocates nothing anew"
    use(1000)
    copy = host.store(storage(1500))  # the place of 2000, since 1000 was used again
    assert kept_bytes(host) == 1000 + 3000
    assert host._cached.take(1000).data_ptr() == first
    assert host._cached.take(3000).data_ptr() == third
    copy.free()


def test_host_memory_forgets_what_measuring_needed_when_it_is_told_what_steps_need() -> None:
    host = HostMemory("cpu")
    copies = [host.store(storage(size)) for size in (5000, 7000)]
    for copy in copies:
        copy.free()
    host.reserve(6000, 1)
    assert kept_bytes(host) <= 6000


def test_buffers_that_are_kept_are_no_space_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows of which sizes storages will be: only what is given up, and then free, counts."""
    host, free = HostMemory("cpu"), []
    host.store(storage(5000)).free()

    def memory() -> SimpleNamespace:
        free.append(2000 if host._cached.nbytes else 4000)  # the rest of those 5000 is taken by somebody else
        return SimpleNamespace(available=free[-1])

    monkeypatch.setattr(psutil, "virtual_memory", memory)
    with pytest.raises(HostError, match="6000 bytes at once: 4000 bytes of CPU memory are free"):
        host.reserve(6000, 1)
    assert free == [2000, 4000]
    host.reserve(4000, 1)


def test_a_disk_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HostDisk(tmp_path) as host:
        monkeypatch.setattr(os, "pwrite", lambda *args: 0)
        copy = host.store(torch.ones(5).untyped_storage())
        with pytest.raises(HostError, match="took none of the last 20 bytes"):
            copy.settle()


@pytest.mark.parametrize("folder", [1, None, 2.5])
def test_a_folder_is_a_path(folder: object) -> None:
    with pytest.raises(TypeError, match="name a folder"):
        HostDisk(folder)  # type: ignore[arg-type]
    os.fstat(1)  # still open
