"""The contract table's rows of pipelines can fail, and what ranks have of a record is put together rightly."""

from pathlib import Path

import pytest
import torch

from contract import broken
from contract.bench import run
from contract.in_stages import all_completed, completed, of_all_ranks, together
from contract.ranks import RankRuns
from contract.record import Record, assert_same_run
from contract.rows import PLAIN
from contract.scenarios import SCENARIOS

NAME = "optimizer_momentum"
NAN = float("nan")


def test_catches_one_rank_that_trains_wrongly(tmp_path: Path) -> None:
    ours = RankRuns("wrong_in_stages", [NAME], tmp_path)
    try:
        ranks = all_completed(ours.records(NAME), NAME)
    finally:
        ours.stop()
    plain = run(PLAIN["auto"], SCENARIOS[NAME], tmp_path / "plain")
    for one in ranks:
        with pytest.raises(AssertionError, match="differs from the plain one"):
            assert_same_run(plain, one, broken.WRONG_IN_STAGES.tolerance)


def test_notes_of_micro_batches_become_the_batchs() -> None:
    notes = [{"lr": [0.1], "loss": torch.tensor(1.0)}, {"at": 1}, {"lr": [0.1], "loss": torch.tensor(5.0)}, {"at": 1}]
    assert together(notes, [0.75, 0.25]) == [{"lr": [0.1], "loss": torch.tensor(2.0)}, {"at": 1}]
    with pytest.raises(AssertionError, match="1 notes of"):
        together(notes[:1], [0.75, 0.25])


def test_a_ranks_nan_is_what_others_have() -> None:
    mine, other = torch.tensor([1.0, NAN]), torch.tensor([3.0, 2.0])
    assert completed(mine, other).tolist() == [1.0, 2.0]
    assert completed({"a": [NAN, 1.0]}, {"a": [0.5, 7.0], "b": 3}) == {"a": [0.5, 1.0], "b": 3}
    assert of_all_ranks([[{"w": 1.0}], [{"w": NAN}, {"loss": 2.0}]]) == [{"w": 1.0}, {"loss": 2.0}]


def test_what_each_rank_must_have_is_not_taken_from_others() -> None:
    whole, lacks = ({"weights": {"w": value}, "logged": [value], "trace": [value]} for value in (1.0, NAN))
    rests = {"schedulers": [], "global_step": 1, "epoch": 1, "metrics": {}}
    records = [Record({"fit 1": fit | rests}) for fit in (whole, lacks)]
    _, second = all_completed(records, NAME)
    assert second.entries["fit 1"]["trace"] == [1.0]
    with pytest.raises(AssertionError, match="logged/0: off by nan"):
        assert_same_run(records[0], second)
    _, second = all_completed(records, "exception_in_training_step")
    assert second.entries["fit 1"]["weights"] == {"w": 1.0}
