"""Ranks with fewer batches than others, in `join()`: each owner of DDP's communication hook trains as DDP by itself."""

import pytest

from support.ranks import run_ranks


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_run_out_of_batches_count_as_in_ddp(count: int) -> None:
    for number, rank in enumerate(run_ranks(count, "join_worker.py")):
        assert f"rank {number}: as ddp" in rank.stdout, rank.stderr[-3000:]
