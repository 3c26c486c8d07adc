"""Sums on the host among processes: what they choose, and what becomes of them when one is lost."""

import gc
import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from retime.foundations.ddp import RankLostError
from retime.foundations.native import NoLibraryError
from retime.mechanisms.cpu_accumulation import HostReducer
from retime.mechanisms.cpu_accumulation import shared_sums as sums
from retime.mechanisms.cpu_accumulation.shared_sums import SharedFile, sums_library
from retime.strategies import CPUAccumulateStrategy
from support.ranks import RANK, RANKS, on_ranks, run_ranks
from support.time_limits import limit_s
from support.trainers import quiet_trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")


@pytest.fixture(autouse=True)
def _compiled() -> None:
    library = sums_library()
    if isinstance(library, NoLibraryError):
        pytest.skip(str(library))


def gathered(values: Tensor) -> list[Tensor]:
    every = [torch.empty_like(values) for _ in range(RANKS)]
    dist.all_gather(every, values)
    return every


def added(way: sums.HostSums, size: int = 300_001) -> Tensor:
    """The sum of random values, which is the same on all ranks, and that of gathering them."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(RANK))
    every = gathered(values)
    way.add(values)
    assert all(torch.equal(values, other) for other in gathered(values))
    total = every[0].clone()
    for other in every[1:]:
        total += other
    torch.testing.assert_close(values, total, rtol=1e-6, atol=1e-6)
    return (values == total).all()


@on_ranks(2, 4)
def test_one_machine() -> None:
    for _ in range(2):
        one, two = sums.host_sums(), sums.host_sums()
        assert one.note == f"{RANKS} ranks in shared memory"
        assert added(one), "not in the order of the ranks"
        assert added(two)
        one.close()
        assert added(two)
        two.close()
    assert not any("retime" in name for name in os.listdir("/dev/shm"))


@on_ranks(4)
def test_two_machines() -> None:
    with patch.object(sums, "machine", lambda: f"host {RANK % 2}"):
        way = sums.host_sums()
    assert way.note == f"{RANKS // 2} ranks in shared memory, 2 machines through gloo"
    added(way)
    half = torch.full((1000,), 1.5, dtype=torch.bfloat16)
    way.add(half)
    assert torch.equal(half, torch.full_like(half, 1.5 * RANKS))
    way.close()


@on_ranks(2)
def test_memory_that_is_not_shared() -> None:
    def find(path: str) -> SharedFile:
        raise PermissionError(13, "not yours")

    for why, note in (
        (patch.object(sums, "machine", lambda: f"host {RANK}"), "each rank is on a machine of its own"),
        (patch.object(SharedFile, "find", find if RANK == 1 else SharedFile.find), "rank 1: memory that /proc/.*"),
    ):
        with why:
            way = sums.host_sums()
        assert re.fullmatch(rf"through gloo \({note}\)", way.note), way.note
        added(way)
        way.close()


@on_ranks(2)
def test_no_compiler_on_one() -> None:
    sums_library.cache_clear()
    with TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, "CXX": "/none"} if RANK == 1 else {}
        way = sums.host_sums()
    assert "through gloo (rank 1: sums in shared memory cannot be compiled" in way.note, way.note
    added(way)
    half = torch.ones(10, dtype=torch.float16)
    way.add(half, 0.5)
    assert torch.equal(half, torch.full_like(half, RANKS / 2))
    way.close()
    sums_library.cache_clear()
    os.environ.pop("CXX", None)
    os.environ.pop("XDG_CACHE_HOME", None)


@on_ranks(2)
def test_little_memory() -> None:
    make = SharedFile.make
    asked: list[int] = []

    def few(size: int) -> SharedFile:
        asked.append(size)
        if size > 200_000:
            raise OSError(12, "no memory")
        return make(size)

    with patch.object(SharedFile, "make", few):
        way = sums.host_sums()
    assert "in shared memory" in way.note
    assert len(asked) == (3 if RANK == 0 else 0), asked
    assert added(way)
    way.close()
    with patch.object(SharedFile, "make", lambda size: few(2**60)):
        way = sums.host_sums()
    assert "through gloo (rank 0: no " in way.note, way.note
    way.close()


@on_ranks(2)
def test_urgent_sums_overtake() -> None:
    reducer = HostReducer(overtakes=True)
    bulk, urgent, goes_on = torch.ones(2**22), torch.ones(4), threading.Event()
    reducer._lanes[0].thread.submit(goes_on.wait, limit_s(60))
    many = [reducer.start(key, bulk) for key in range(8)]
    reducer.start("urgent", urgent, urgent=True).wait()
    assert not many[-1].done(), "the urgent sum waited for all others"
    goes_on.set()
    torch.futures.wait_all(many)
    assert torch.equal(urgent, torch.full_like(urgent, RANKS))
    assert torch.equal(bulk, torch.full_like(bulk, float(RANKS) ** 8))
    reducer.close()


def killed_in_a_sum() -> None:
    way = sums.host_sums(timeout=timedelta(minutes=10))
    added(way)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        way.add(torch.ones(10**6))
    except RankLostError as error:
        print(f"rank {RANK}: {time.monotonic() - began:.1f} s: {error}", flush=True)
    os._exit(0)


class Dies(LightningModule):
    """On rank 1, in step 2."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.net, self.when = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), when

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dies = RANK == 1 and batch_idx == 2
        if dies and self.when == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and self.when == "raises":
            raise ArithmeticError("rank 1's own mistake")
        for number, layer in enumerate(self.net):
            batch = layer(batch)
            if dies and self.when == "backward" and number == 3:
                batch.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_dies(when: str) -> None:
    strategy = CPUAccumulateStrategy(bucket_cap_mb=0.02, timeout=timedelta(minutes=10))
    trainer = quiet_trainer(devices=RANKS, strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    began = time.monotonic()
    try:
        trainer.fit(Dies(when), DataLoader([torch.randn(4, 64) for _ in range(5)], batch_size=None))
    except Exception as error:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("retime-sums")
        print(f"rank {RANK}: {time.monotonic() - began:.1f} s, {maps} maps: {error}", flush=True)
    os._exit(0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_ends_the_others_sums(ranks: int) -> None:
    runs = run_ranks(ranks, __file__, "killed_in_a_sum")
    for rank in set(range(ranks)) - {1}:
        (line,) = re.findall(r"rank \d: ([\d.]+) s: rank 1 \(process \d+\) (?:failed or )?ended", runs[rank].stdout)
        assert float(line) < limit_s(10)
    assert not any("retime" in name for name in os.listdir("/dev/shm"))


@pytest.mark.parametrize(
    ("when", "reason"),
    [pytest.param("forward", "ended", marks=pytest.mark.long), ("backward", "ended"), ("raises", "failed or ended")],
)
def test_a_fit_in_which_a_rank_is_lost_ends_with_its_name(when: str, reason: str) -> None:
    first, second = run_ranks(2, __file__, f"fit_dies|{when}", joined=False)
    (seconds, maps) = re.findall(rf"rank 0: ([\d.]+) s, (\d+) maps: .*rank 1 \(process \d+\) .*{reason}", first.stdout)[
        0
    ]
    assert float(seconds) < limit_s(30)
    assert maps == "0", "the memory is still mapped"
    if when == "raises":
        assert "rank 1's own mistake" in second.stdout
