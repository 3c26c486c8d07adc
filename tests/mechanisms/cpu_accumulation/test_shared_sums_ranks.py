"""Sums on the host among processes: what they choose, and what becomes of them when one is lost."""

import os
import re
import sys

import pytest

from retime.foundations.native import NoLibraryError
from retime.mechanisms.cpu_accumulation.shared_sums import sums_library
from support.ranks import run_ranks, said_in
from support.time_limits import limit_s

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
WORKER = "host_sums_worker.py"
CHOICES = ("one_machine", "each_on_its_own", "no_compiler_on_one", "memory_that_one_cannot_reach", "little_memory")


@pytest.fixture(autouse=True)
def _compiled() -> None:
    library = sums_library()
    if isinstance(library, NoLibraryError):
        pytest.skip(str(library))


@pytest.mark.parametrize(
    ("ranks", "checks"),
    [(2, (*CHOICES, "urgent_sums_overtake", "sizes_that_differ")), (4, ("two_machines", "one_machine"))],
)
def test_sums_are_made_the_fastest_way_that_all_ranks_have(ranks: int, checks: tuple[str, ...]) -> None:
    for run in run_ranks(ranks, WORKER, *checks):
        for check in checks:
            said_in(run, check)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_ends_the_others_sums(ranks: int) -> None:
    runs = run_ranks(ranks, WORKER, "killed_in_a_sum")
    for rank in set(range(ranks)) - {1}:
        (line,) = re.findall(r"rank \d: ([\d.]+) s: rank 1 \(process \d+\) (?:failed or )?ended", runs[rank].stdout)
        assert float(line) < limit_s(10)
    assert not any("retime" in name for name in os.listdir("/dev/shm"))


@pytest.mark.parametrize(
    ("when", "reason"),
    [pytest.param("forward", "ended", marks=pytest.mark.long), ("backward", "ended"), ("raises", "failed or ended")],
)
def test_a_fit_in_which_a_rank_is_lost_ends_with_its_name(when: str, reason: str) -> None:
    first, second = run_ranks(2, WORKER, f"fit_dies|{when}")
    (seconds, maps) = re.findall(rf"rank 0: ([\d.]+) s, (\d+) maps: .*rank 1 \(process \d+\) .*{reason}", first.stdout)[
        0
    ]
    assert float(seconds) < limit_s(30)
    assert maps == "0", "the memory is still mapped"
    if when == "raises":
        assert "rank 1's own mistake" in second.stdout
