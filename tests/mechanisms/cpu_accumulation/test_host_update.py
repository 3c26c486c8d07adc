"""Updates that the ranks of a machine divide, among processes; whole fits are in the contract table."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from retime.foundations.native import NoLibraryError
from retime.mechanisms.cpu_accumulation import HostUpdate
from retime.mechanisms.cpu_accumulation.shared_sums import sums_library
from support.ranks import run_ranks, said_in
from support.time_limits import limit_s

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
WORKER = "host_update_worker.py"
CHECKS = [
    *("optimizers", "state_from_before", "parameters_change", "closures", "backward_through_old_weights"),
    *("states_are_whole_and_come_back", "all_ranks_fail", "gradients_that_differ", "weights_that_differ"),
    *("hooks_that_come_later", "optimizers_that_stay_whole", "exception_in_a_step", "one_rank_goes_on"),
    "state_that_cannot_be_sent",
]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    library = sums_library()
    if isinstance(library, NoLibraryError):
        pytest.skip(str(library))


@cache
def started() -> list[subprocess.CompletedProcess[str]]:
    """One pair of ranks for all checks."""
    return run_ranks(2, WORKER, *CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(name: str) -> None:
    for rank in started():
        said_in(rank, name)


def test_two_machines() -> None:
    for rank in run_ranks(4, WORKER, "two_machines"):
        said_in(rank, "two_machines")


def test_a_state_goes_to_another_number_of_ranks(tmp_path: Path) -> None:
    for ranks, check in ((3, "saves"), (2, "resumes")):
        for run in run_ranks(ranks, WORKER, case := f"{check}|{tmp_path / 'state.pt'}"):
            said_in(run, case)


def test_a_fit_reports_what_a_rank_holds_and_ends_with_the_whole_state() -> None:
    reports = [
        re.findall(r"rank \d: (\d+) (\d+) (\d+) (\d+)", run.stdout) for run in run_ranks(2, WORKER, "fit_reports")
    ]
    counts = [[int(one) for one in lines[0]] for lines in reports]
    (steps, mine, whole, at_end), (_, other, _, other_at_end) = counts
    assert steps == 5
    assert mine + other == whole == at_end == other_at_end
    assert max(mine, other) < 0.6 * whole


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_rank_that_is_lost_in_its_update_ends_the_others_fit(killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if killed:
        monkeypatch.setenv("RETIME_TEST_KILL", "1")
    first, second = run_ranks(2, WORKER, "fit_fails")
    reason = "ended" if killed else "failed or ended"
    lost = re.findall(rf"rank 0: ([\d.]+) s: RankLostError: rank 1 \(process \d+\) {reason}", first.stdout)
    assert len(lost) == 1, first.stdout + first.stderr[-3000:]
    assert float(lost[0]) < limit_s(30)
    assert ("rank 1's own mistake" in second.stdout) is not killed


def test_parameters_on_a_device_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="takes parameters on processors, not on meta"):
        HostUpdate(torch.optim.SGD([parameter]), [parameter])
