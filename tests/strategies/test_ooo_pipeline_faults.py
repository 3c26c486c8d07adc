"""A rank of `ooo_pipeline` is killed or raises: the other ends with its name, and nothing is left."""

from pathlib import Path

import pytest

from support.process_ends import in_shared_memory, runs
from support.ranks import run_two_ranks

LOST = "RankLostError a message of"
FAULTS = {
    "gathers": (0, f"{LOST} rank 1 did not come"),
    "writes": (1, f"{LOST} rank 0 did not come"),
    "raises": (0, f"{LOST} rank 1 (stage"),
}


@pytest.mark.parametrize("how", [pytest.param("gathers", marks=pytest.mark.long), "writes", "raises"])
def test_the_other_rank_ends_with_its_name(how: str, tmp_path: Path) -> None:
    ranks = run_two_ranks("pipeline_faults.py", how, str(tmp_path), timeout_s=60)
    other, said = FAULTS[how]
    pid, _, error = ranks[other].stdout.partition("\n")
    assert error.startswith(said), ranks[other].stderr[-2000:]
    failed = ranks[1 - other]
    if how == "raises":
        assert failed.stdout.partition("\n")[2].startswith("ArithmeticError of the module's own")
        for one in ranks:  # behind it, a checkpoint would have a part of the model
            assert "PipelineError 'net." in one.stdout
            assert "lies on another rank, since training over ranks that ended with an exception" in one.stdout
        assert not (tmp_path / "part.ckpt").exists()
    else:
        assert failed.returncode == -9
    for process in (pid, failed.stdout.split()[0]):
        assert not runs(process)
        assert not in_shared_memory(process)
