"""Host tiers: where bytes go, what they say when there is no place, and places used again."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from retime.mechanisms.memory.host import HostError, parse_host
from retime.mechanisms.memory.host_disk import HostDisk
from retime.mechanisms.memory.host_extents import Extents
from retime.mechanisms.memory.host_memory import HostMemory
from retime.mechanisms.memory.host_null import HostNull
from retime.mechanisms.no_effect import NoEffectWarning


def storage(nbytes: int, seed: int = 0) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def contents(where: torch.UntypedStorage) -> bytes:
    return bytes(where.tolist())


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_what_comes_back_is_what_left(tmp_path: Path, tier: str) -> None:
    host = HostDisk(tmp_path, workers=3) if tier == "disk" else HostMemory("cpu")
    sources = [storage(size, size) for size in (1, 4095, 4096, 4097, 100_000)]
    copies = [host.store(source) for source in sources]
    targets = [storage(source.nbytes(), 99) for source in sources]
    loads = [copy.load(target) for copy, target in zip(copies, targets, strict=True)]
    for load, copy in zip(loads, copies, strict=True):
        load.wait()
        copy.settle()
    assert [contents(target) for target in targets] == [contents(source) for source in sources]
    assert host.bytes_held() == sum(source.nbytes() for source in sources)
    for copy in copies:
        copy.free()
        copy.free()
    assert host.bytes_held() == 0
    host.close()
    host.close()


def test_space_is_reserved_before_the_first_step(tmp_path: Path) -> None:
    with HostDisk(tmp_path, capacity_bytes=3_000_000) as host:
        assert os.fstat(host._file.fileno()).st_blocks * 512 >= 3_000_000
        assert os.listdir(tmp_path) == []  # the file has no name


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"missing.*name an existing folder") as caught:
        parse_host(f"disk:{tmp_path}/missing", "cpu")
    assert caught.value.errno == errno.ENOENT


def test_a_full_disk_says_what_to_do_and_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with HostDisk(tmp_path) as host:
        monkeypatch.setattr(os, "posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(HostError, match="raise the budget so that less is offloaded") as caught:
                host.store(storage(5000))
            assert caught.value.errno == errno.ENOSPC
        assert host.bytes_held() == 0
    with pytest.raises(HostError):
        HostDisk(tmp_path, capacity_bytes=1)


def test_a_real_limit_on_the_file_is_an_error_of_the_forward_pass(tmp_path: Path) -> None:
    program = f"""
import resource, torch
from retime.mechanisms.memory.host import HostError
from retime.mechanisms.memory.host_disk import HostDisk
from retime.mechanisms.memory.offload import OffloadSavedTensors
from retime.schedules.memory import OffloadPlan
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
host = HostDisk({str(tmp_path)!r})
leaf = torch.ones(10_000, requires_grad=True)
try:
    with OffloadSavedTensors(OffloadPlan(1, frozenset(range(3)), 0, 3), host, [leaf]):
        leaf.exp().exp().exp().sum()
except HostError as error:
    print("refused", leaf.grad is None, host.bytes_held())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["refused", "True", "0"]


def test_a_folder_in_memory_is_warned_of() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no file system in memory here")
    with pytest.warns(NoEffectWarning, match="offloading there frees nothing"):
        HostDisk("/dev/shm").close()


def test_parse_host(tmp_path: Path) -> None:
    host = parse_host(f"disk:{tmp_path}", "cpu", capacity_bytes=10)
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


def test_null_counts_only() -> None:
    host = HostNull()
    copy = host.store(storage(10))
    assert host.bytes_held() == 10
    copy.free()
    assert host.bytes_held() == 0


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


def test_a_disks_threads_run_from_the_start(tmp_path: Path) -> None:
    """One that is to start when memory is used up may hang for ever."""
    before = set(threading.enumerate())
    with HostDisk(tmp_path, workers=2):
        assert len(set(threading.enumerate()) - before) == 2
    assert set(threading.enumerate()) <= before
