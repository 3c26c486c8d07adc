"""A host that fails in the middle of training under a memory budget: no corrupted step, and nothing left behind."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from retime.mechanisms.memory_budget.offload.hosts import HostDisk, HostMemory
from retime.mechanisms.memory_budget.offload.tier import HostError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import ShallowNet, assert_close, fit, loader, report_of
from support.paths import TESTS
from support.process_ends import first_line
from support.time_limits import limit_s
from support.warm_start import Warm, run_program

pytestmark = [
    *support.IGNORED,
    pytest.mark.filterwarnings("ignore:host='disk.*is a file system in memory"),
    pytest.mark.usefixtures("offloads"),
]
WHOLE, BOTH = 100_000, 70_000  # the second one: two sub-batches, of which 4 storages each are offloaded


class Adam(ShallowNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Batches(Callback):
    """Calls back when a batch begins."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self.call = call

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.call(batch_idx)


@pytest.fixture
def nothing_left() -> Callable[[Path], bool]:
    """Whether a folder has no file with a name or without one, and no thread runs that the test has started."""
    before = set(threading.enumerate())  # threads of earlier tests end when they are collected

    def check(folder: Path) -> bool:
        opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return (
            not (folder.exists() and os.listdir(folder))
            and not any(str(folder) in path for path in opened)
            and set(threading.enumerate()) <= before
        )

    return check


def fails_from(monkeypatch: pytest.MonkeyPatch, name: str, nth: int) -> Callable[[int], None]:
    """In batch 1, the n-th call to the host says that the disk is full; returns what is to be told of batches."""
    real = getattr(HostDisk, name) if name == "store" else getattr(os, name)
    batch, calls = -1, 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += batch == 1
        if batch == 1 and calls > nth:
            kind: type[OSError] = HostError if name == "store" else OSError
            raise kind(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    def tell(index: int) -> None:
        nonlocal batch
        batch = index

    monkeypatch.setattr(HostDisk if name == "store" else os, name, failing)
    return tell


@pytest.mark.parametrize(
    ("name", "nth", "budget"),
    [
        pytest.param("store", 3, WHOLE, marks=pytest.mark.long),  # in the forward pass
        ("pwrite", 3, WHOLE),
        ("preadv", 3, WHOLE),  # in the backward pass: some gradients are there
        ("store", 5, BOTH),  # in the second sub-batch: all gradients are there, of the first one
        pytest.param("preadv", 5, BOTH, marks=pytest.mark.long),
    ],
)
def test_weights_and_states_are_those_of_the_step_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: Callable[[Path], bool],
    name: str,
    nth: int,
    budget: int,
) -> None:
    plain, ours = Adam(), Adam()
    done = fit(plain, limit_train_batches=1)
    tell = fails_from(monkeypatch, name, nth)
    strategy = MemoryBudgetStrategy(budget, host=f"disk:{tmp_path}")
    runner = support.trainer(strategy, callbacks=[Batches(tell)])
    hint = "" if name == "store" else ".*Free some, name another folder, or raise the budget"
    with pytest.raises(HostError, match="No space left" + hint):
        runner.fit(ours, loader(3))
    shape = report_of(runner).shapes[0]
    assert (shape.choice.plan.sub_batch < support.BATCH) == (budget == BOTH)
    assert_close(plain, ours, 0 if budget == WHOLE else 1e-5)
    left, right = done.optimizers[0].state_dict()["state"], runner.optimizers[0].state_dict()["state"]
    assert left.keys() == right.keys()
    for number, state in left.items():
        assert right[number]["step"] == state["step"] == 1
        torch.testing.assert_close(right[number]["exp_avg_sq"], state["exp_avg_sq"])
    assert nothing_left(tmp_path)


def test_a_folder_that_is_removed_meanwhile_does_no_harm(tmp_path: Path, nothing_left: Callable[[Path], bool]) -> None:
    folder = tmp_path / "host"
    folder.mkdir()
    plain, ours = ShallowNet(), ShallowNet()
    fit(plain)
    gone = Batches(lambda index: shutil.rmtree(folder) if index == 1 else None)
    done = fit(ours, MemoryBudgetStrategy(WHOLE, host=f"disk:{folder}"), callbacks=[gone])
    assert report_of(done).offload.storages > 0
    assert not folder.exists()
    assert_close(plain, ours, 0)
    assert nothing_left(folder)


class Fails(ShallowNet):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx == 1:
            raise self.error
        return loss


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        pytest.param(RuntimeError("of the user's own"), RuntimeError, marks=pytest.mark.long),
        (KeyboardInterrupt(), SystemExit),
    ],
)
def test_nothing_is_left_after_an_exception(
    tmp_path: Path, nothing_left: Callable[[Path], bool], error: BaseException, seen: type[BaseException]
) -> None:
    plain, ours = ShallowNet(), Fails(error)
    fit(plain, limit_train_batches=1)
    runner = support.trainer(MemoryBudgetStrategy(WHOLE, host=f"disk:{tmp_path}"))
    with pytest.raises(seen):
        runner.fit(ours, loader(3))
    assert report_of(runner).offload.storages > 0
    assert_close(plain, ours, 0)
    assert nothing_left(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    program = f"""
import os, time, torch
from retime.mechanisms.memory_budget.offload.hosts import HostDisk
from retime.mechanisms.memory_budget.offload.saved_tensors import OffloadSavedTensors
from retime.schedules.budget import OffloadPlan
host = HostDisk({str(tmp_path / "host")!r})
leaf = torch.ones(100_000, requires_grad=True)
with OffloadSavedTensors(OffloadPlan(1, frozenset(range(3)), 0, 3), host, [leaf]):
    loss = leaf.exp().exp().exp().sum()
    print(os.getpid(), host.live_bytes(), flush=True)
    time.sleep(600)
"""
    host = tmp_path / "host"
    host.mkdir()
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(program)
    with Warm(str(script), [], {**os.environ}, out, tmp_path / "errors") as worker:
        pid, nbytes = first_line(out, worker).split()
        opened = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
        assert int(nbytes) >= 1_200_000
        assert sum(str(host) in path for path in opened) == 1
        assert os.listdir(host) == [], "no name, so nothing to find later"
        os.kill(int(pid), signal.SIGKILL)
        worker.wait(limit_s(20))
    assert os.listdir(host) == []


def may_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not may_mount(), reason="needs to mount a file system")
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A real full file system: refused when a larger batch is planned, and nothing of the step is done."""
    program = FILLS_UP.replace("TESTS", repr([str(TESTS), str(Path(__file__).parent)])).replace(
        "FOLDER", repr(str(tmp_path))
    )
    text = run_program(program)
    assert "same weights True; same momenta True; files []" in text, text
    assert "has no space for" in text, text
    assert "No space left on device; 4096 bytes free" in text, text
    assert "name another folder, or raise the budget" in text, text


FILLS_UP = """
import ctypes, errno, os, subprocess, sys
folder = FOLDER
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS: what is mounted from now on is this process's alone
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
sys.path[:0] = TESTS
import torch
from torch.utils.data import DataLoader
from support import memory_budget as support
import retime.mechanisms.memory_budget.planner as step_planner
from retime.mechanisms.memory_budget.offload.tier import HostError
from retime.strategies import MemoryBudgetStrategy
from test_host import Adam, Batches
step_planner.calibrate = step_planner.least_costs = lambda *_, **__: support.OFFLOADS
step_planner.PlanTrial.step_ms = lambda *_: None
small, large = next(iter(support.loader(1))), next(iter(support.loader(1, batch=1024)))
ballast = []
def fill(index):
    if index == 1:
        room = os.statvfs(folder)
        with open(folder + "/ballast", "wb") as file:
            file.write(bytes(room.f_bavail * room.f_frsize - 4096))
plain, ours = Adam(), Adam()
one = support.fit(plain, data=DataLoader([small], batch_size=None))
two = support.trainer(MemoryBudgetStrategy(500_000, host="disk:" + folder), callbacks=[Batches(fill)])
try:
    two.fit(ours, DataLoader([small, large], batch_size=None))
except HostError as error:
    assert error.errno == errno.ENOSPC
    print(error)
a, b = plain.state_dict(), ours.state_dict()
weights = all(torch.equal(a[name], b[name]) for name in a)
a, b = (made.optimizers[0].state_dict()["state"] for made in (one, two))
momenta = all(torch.equal(a[number]["exp_avg"], b[number]["exp_avg"]) for number in a) and a.keys() == b.keys()
os.unlink(folder + "/ballast")
print(f"same weights {weights}; same momenta {momenta}; files {os.listdir(folder)}")
"""


def test_host_memory_that_is_not_there() -> None:
    host = HostMemory("cpu")
    host.reserve(1000, 3)
    with pytest.raises(HostError, match=r"bytes of CPU memory are free\. Free some, or raise the budget"):
        host.reserve(2**60, 1)
