"""Fits of `MemoryBudgetStrategy` in processes under a limit of data bytes, in which the plain strategy dies."""

import gc
import json
import sys
import weakref
from functools import cache
from typing import Any

import pytest
import torch

from support.memory_budget import IGNORED, SHALLOW, ShallowNet, fit_both
from support.paths import PYTHONPATH, SUPPORT, TESTS
from support.warm_start import run_program

MIB = 2**20
DISK = TESTS.parent  # a folder for temporary files may be in memory
BUDGET = 32 * MIB  # the plain step needs more than twice that
HEADROOM = 3 * MIB  # Python takes data by arenas of 1 MiB and the C library's heap grows in steps, used or not
ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits and /proc")
pytestmark = IGNORED


@cache
def worker(budget: str, limit_bytes: int) -> dict[str, Any]:
    """Two fits in a process of their own, the second under the limit."""
    program = (SUPPORT / "memory_limit_fit_worker.py").read_text()
    said = run_program(program, str(DISK), budget, str(limit_bytes), **PYTHONPATH, OMP_NUM_THREADS="1")
    return json.loads(said.splitlines()[-1])


def within_budget() -> dict[str, Any]:
    return worker(str(BUDGET), BUDGET + HEADROOM)


@ON_LINUX
@pytest.mark.long
def test_trains_where_the_plain_strategy_runs_out_of_memory() -> None:
    plain, ours = worker("plain", BUDGET + HEADROOM), within_budget()
    assert "can't allocate memory" in plain["limited"]["error"]
    assert "error" not in ours["limited"], ours["limited"]
    assert ours["limited"]["losses"] == pytest.approx(plain["free"], rel=1e-4)
    assert plain["free"][-1] < 0.999 * plain["free"][0], "nothing was learnt, so equal losses say little"


@ON_LINUX
@pytest.mark.long
def test_the_process_grows_as_the_report_predicts() -> None:
    ours = within_budget()["limited"]
    if ours["source"] != "VmHWM":
        pytest.skip("the kernel does not keep this process's peak")
    huge_page = 2 * MIB  # new memory comes by whole ones where the budget has room for it
    assert ours["measured"] == pytest.approx(ours["predicted"], rel=0.05, abs=huge_page), ours["plan"]


class Watched(ShallowNet):
    """Notes which batches are still there when each step begins."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[weakref.ref[torch.Tensor]] = []
        self.left: list[list[int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.left.append([index for index, one in enumerate(self.batches) if one() is not None])
        self.batches.append(weakref.ref(batch[0]))


def test_batches_go_when_their_step_has_ended(splits: None) -> None:
    gc.collect()
    gc.disable()
    try:
        plain, ours, _ = fit_both(Watched, SHALLOW)
    finally:
        gc.enable()
    assert ours.left == plain.left
