"""On two gloo ranks: plans that are given, and plans without dry runs."""

import subprocess

import pytest

from support.ranks import run_two_ranks, said_in

CHECKS = [
    "plans_of_a_run_are_taken_by_all_ranks",
    "plans_of_the_command_are_taken_by_all_ranks",
    "without_dry_runs_steps_run_as_under_ddp",
    "a_file_that_one_rank_refuses_is_refused_by_all",
    "a_budget_that_one_rank_cannot_keep_ends_all_without_dry_runs",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("plans")
    return run_two_ranks("memory_plan_ddp_worker.py", str(folder), *CHECKS)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str, ranks: list[subprocess.CompletedProcess[str]]) -> None:
    for rank in ranks:
        said_in(rank, name)
