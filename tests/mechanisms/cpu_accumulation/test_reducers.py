"""Each owner of DDP's communication hook sums by the reducer that it was given, and knows nothing of it."""

import subprocess

import pytest

from support.ranks import run_two_ranks


@pytest.fixture(scope="module")
def ranks() -> list[subprocess.CompletedProcess[str]]:
    return run_two_ranks("reducer_worker.py")


@pytest.mark.parametrize("owner", ["fused", "out_of_order", "budgeted"])
def test_an_owner_sums_by_its_reducer(owner: str, ranks: list[subprocess.CompletedProcess[str]]) -> None:
    for number, rank in enumerate(ranks):
        assert f"rank {number}: {owner} done" in rank.stdout, rank.stderr
