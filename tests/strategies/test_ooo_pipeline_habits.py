"""What modules may do in a plain Trainer, and a pipeline changes, is told: by a warning, or by an error."""

import pytest

from support.ranks import run_two_ranks

TOLD = {
    "keeps": "training_step keeps 'losses', 'last' on the module",
    "aggregates": "MeanMetric 'mean_loss' takes a value from each micro-batch",
    "writes": "training_step writes to self.logger",
    "clamps": "'net.0.weight' has a hook on its gradient (register_hook), which runs once a micro-batch",
    "averages": "refused 'average.",
    "packed": "refused 'net.0' takes or gives a PackedSequence",
}
LAST = "skips"
"""Behind it the ranks are of no more use: the first one does not know why the last one ends."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank prints, by habit; one start for all of them."""
    ranks = run_two_ranks("pipeline_habits.py", str(tmp_path_factory.mktemp("habits")), *TOLD, LAST)
    return [dict(one.partition("\n")[::2] for one in f"\n{rank.stdout}".split("\n== ")[1:]) for rank in ranks]


@pytest.mark.parametrize("habit", TOLD)
def test_the_first_rank_warns_at_the_users_line_and_both_refuse(habit: str, said: list[dict[str, str]]) -> None:
    for rank, one in enumerate(said):
        refused = TOLD[habit].startswith("refused")
        wanted = TOLD[habit] if refused else f"pipeline_habits.py {TOLD[habit]}"
        assert one[habit].count(wanted) == (refused or rank == 0), one
        others = [said for said in TOLD.values() if said != TOLD[habit]]
        assert not any(other in one[habit] for other in others), one


def test_a_batch_cannot_be_skipped(said: list[dict[str, str]]) -> None:
    assert "a pipeline cannot skip batches: return 0 * loss in place of None" in said[1][LAST]
