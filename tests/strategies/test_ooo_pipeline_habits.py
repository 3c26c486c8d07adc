"""What modules may do in a plain Trainer, and a pipeline changes, is told: by a warning, or by an error."""

from pathlib import Path

import pytest

from support.two_ranks import run_two_ranks

TOLD = {
    "keeps": "training_step keeps 'losses', 'last' on the module",
    "aggregates": "MeanMetric 'mean_loss' takes a value from each micro-batch",
    "writes": "training_step writes to self.logger",
    "clamps": "'net.0.weight' has a hook on its gradient (register_hook), which runs once a micro-batch",
    "averages": "refused 'average.",
    "packed": "refused 'net.0' takes or gives a PackedSequence",
}


@pytest.mark.parametrize("habit", TOLD)
def test_the_first_rank_warns_at_the_users_line_and_both_refuse(habit: str, tmp_path: Path) -> None:
    for rank, one in enumerate(run_two_ranks("pipeline_habits.py", habit, str(tmp_path), timeout_s=60)):
        refused = TOLD[habit].startswith("refused")
        wanted = TOLD[habit] if refused else f"pipeline_habits.py {TOLD[habit]}"
        assert one.stdout.count(wanted) == (refused or rank == 0), one.stdout + one.stderr[-3000:]
        others = [said for said in TOLD.values() if said != TOLD[habit]]
        assert not any(said in one.stdout for said in others), one.stdout


def test_a_batch_cannot_be_skipped(tmp_path: Path) -> None:
    _, last = run_two_ranks("pipeline_habits.py", "skips", str(tmp_path), timeout_s=60)
    assert "a pipeline cannot skip batches: return 0 * loss in place of None" in last.stdout
