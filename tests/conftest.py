"""Shared by all tests: one thread a process, shares for several processes, the memory budget's ways, and the contract
table's runs.

What needs torch's or Lightning's more expensive parts is imported in the fixtures, for tests of plain Python.
"""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from support.garbage import pass_over_what_is_there
from support.time_limits import limit_s, measure_slowness

if TYPE_CHECKING:
    import pytest_timeout

    from contract.runs import Runs
    from retime.foundations.cpu_pool.pool import MemoryPool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        from support.processes import longest_first

        longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """For `--dist loadfile`: shares of tests."""
    if config.getvalue("dist") != "loadfile":
        return None
    from support.processes import Shares

    return Shares(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: "pytest_timeout.Settings") -> object:
    """A test's limit, and all others that it sets with `limit_s`, are longer on a slow or busy machine."""
    from pytest_timeout import pytest_timeout_set_timer as set_timer

    measure_slowness()
    return set_timer(item, settings._replace(timeout=limit_s(settings.timeout)))


# What Lightning leaves there: the address of a process group, where processes that a later test starts would listen and
# this one still does; a rank, from which Accelerate concludes that there are others; a seed; a number of threads.
LEFT_BY_FITS = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "OMP_NUM_THREADS"),
)
BEFORE = {name: os.environ.get(name) for name in LEFT_BY_FITS}


@pytest.fixture(autouse=True)
def _short_collections() -> None:
    pass_over_what_is_there()


@pytest.fixture(autouse=True)
def _as_before_all_tests() -> Iterator[None]:
    """Fits of this test, and of fixtures that several tests share, change neither the environment nor the number of
    threads of the next test."""
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for one another
    yield
    for name, value in BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt``, also where tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["offload", "sub-batches"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a memory budget is kept: what the costs make the cheaper way."""
    from support.memory_budget import WAYS, use_costs

    use_costs(monkeypatch, WAYS[request.param])
    return str(request.param)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sub-batches are the cheaper way to keep a memory budget."""
    from support.memory_budget import SPLITS, use_costs

    use_costs(monkeypatch, SPLITS)


@pytest.fixture
def offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading is the cheaper way to keep a memory budget."""
    from support.memory_budget import OFFLOADS, use_costs

    use_costs(monkeypatch, OFFLOADS)


@pytest.fixture
def pool() -> "Iterator[MemoryPool]":
    """The pool of CPU tensors, with nothing kept and no counts of earlier tests."""
    from retime.foundations.cpu_pool.pool import MemoryPool

    gc.collect()  # users and tensors that earlier tests left in cycles
    pool = MemoryPool()
    if not pool.install():
        pytest.skip(pool.why_not)
    pool.limit(0)
    pool.reset_peaks()
    yield pool
    pool.remove()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Iterator[list[bool]]":
    """As where there is none; how often the C library was asked instead. It is not, as it cannot be asked back."""
    from retime.foundations.cpu_pool import pool as freed_memory
    from retime.foundations.cpu_pool.pool import pool_library

    asked: list[bool] = []
    monkeypatch.setattr(freed_memory, "give_back_freed_memory", lambda: asked.append(True) or True)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pool_library.cache_clear()
    yield asked
    pool_library.cache_clear()


@pytest.fixture(scope="session")
def contract_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Runs]":
    from contract.runs import Runs

    chosen: dict[str, set[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "row" in parameters and "scenario" in parameters:
            for row in (parameters["row"], parameters["row"].reference):
                chosen.setdefault(row.name, set()).add(parameters["scenario"].name)
    runs = Runs(tmp_path_factory.mktemp("contract"), chosen)
    gc.collect()  # else what earlier tests left in cycles stays to the end of the session
    gc.freeze()  # BatchSizeFinder collects garbage again and again; this spares it torch's own objects
    yield runs
    gc.unfreeze()
    runs.stop()
