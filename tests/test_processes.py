"""How tests are shared out among several processes, and how long they may take."""

import signal
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest_timeout import Settings

from contract.rows import STRATEGIES
from support import time_limits
from support.processes import LONGEST, TABLE, share_of
from support.time_limits import limit_s, measure_slowness

ROOT = Path(__file__).parents[1]


def test_rows_with_one_plain_run_share_a_process() -> None:
    shares = {row.plain: set() for row in STRATEGIES}
    for row in STRATEGIES:
        shares[row.plain].add(share_of(f"{TABLE}::test_equals_the_plain_strategy[{row.name}-a_scenario]"))
    assert shares == {"auto": {TABLE}, "pipeline": {TABLE}, "ddp": {f"{TABLE} on several ranks"}}


def test_a_file_is_a_share() -> None:
    assert share_of("tests/a/test_b.py::test_c[ddp-::]") == share_of("tests/a/test_b.py::test_d") == "tests/a/test_b.py"


def test_the_longest_shares_are_there() -> None:
    assert all((ROOT / share.removesuffix(" on several ranks")).is_file() for share in LONGEST)


@pytest.mark.parametrize(
    ("arithmetic", "load", "slowness"),
    [(0.5, 0.1, 1.0), (3.5, 0.5, 3.5), (1.0, 3.0, 3.0), (1.0, 500.0, 4.0)],
    ids=["idle and fast", "slow", "many processes on each core", "no end"],
)
def test_limits_grow_on_a_slow_or_busy_machine(
    monkeypatch: pytest.MonkeyPatch, arithmetic: float, load: float, slowness: float
) -> None:
    times = accumulate([0, arithmetic * time_limits._REFERENCE_S, 1, 60, arithmetic * time_limits._REFERENCE_S])
    monkeypatch.setattr(time_limits, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(time_limits, "_measured_at", float("-inf"))
    monkeypatch.setattr(time_limits, "_processes_a_core", lambda: load)
    monkeypatch.setenv(time_limits._VARIABLE, "1")
    measure_slowness()
    assert limit_s(5) == 5 * slowness
    monkeypatch.setattr(time_limits, "_processes_a_core", lambda: 2.0)
    measure_slowness()  # not yet again
    assert limit_s(5) == 5 * slowness
    measure_slowness()  # a minute later
    assert limit_s(5) == 5 * max(2, arithmetic)


@pytest.mark.parametrize(("workers", "processes"), [("1", 3.5), ("4", 2.0), ("8", 1.0)])
def test_limits_do_not_grow_by_the_suites_workers(
    monkeypatch: pytest.MonkeyPatch, workers: str, processes: float
) -> None:
    monkeypatch.setattr(time_limits.os, "getloadavg", lambda: (6.0, 0.0, 0.0))
    monkeypatch.setattr(time_limits.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
    assert time_limits._processes_a_core() == processes


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="pytest-timeout's signal")
def test_a_tests_own_limit_grows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "_measured_at", float("inf"))
    monkeypatch.setenv(time_limits._VARIABLE, "3")
    settings = Settings(1000, "signal", False, False)
    request.config.hook.pytest_timeout_set_timer(item=request.node, settings=settings)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 2000 < left <= 3000
