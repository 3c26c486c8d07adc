"""The contract table's rows in sub-batches can fail: wrong weights, and batches that are split or whole by mistake."""

from pathlib import Path

import pytest
import torch

from contract.bench import run
from contract.in_parts import folded, uneven_parts
from contract.record import Record, assert_same_run
from contract.rows import PLAIN, STRATEGIES
from contract.scenarios import SCENARIOS
from retime.foundations.parts.combine import Certificate
from retime.mechanisms.memory_budget import sub_batches
from retime.mechanisms.memory_budget.planner import StepPlanner

ROW = next(row for row in STRATEGIES if row.name == "memory_budget_parts")
NAME = "optimizer_sgd"


def ours(folder: Path) -> Record:
    return run(ROW, SCENARIOS[NAME], folder)


def test_catches_equal_weights_of_uneven_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sub_batches, "loss_weights", lambda certificate, parts, samples: [0.5, 0.5])
    with pytest.raises(AssertionError, match="differs from the plain one"):
        assert_same_run(run(PLAIN["auto"], SCENARIOS[NAME], tmp_path / "plain"), ours(tmp_path), ROW.tolerance)


def test_catches_batches_that_stay_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(StepPlanner, "certify", lambda *_, **__: Certificate(None, "of no reason"))
    with pytest.raises(AssertionError, match="of no reason"):
        ROW.check_activity(frozenset(), ours(tmp_path))


def test_catches_batches_that_are_split(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="split that has to stay whole"):
        ROW.check_whole("target_network", ours(tmp_path))


def test_parts_are_uneven() -> None:
    assert [part[0].tolist() for part in uneven_parts([torch.arange(4)], 3)] == [[0, 1, 2], [3]]
    assert len(uneven_parts([torch.arange(4)], 4)) == 1


def test_a_trace_of_parts_becomes_the_batchs() -> None:
    parts = [{"lr": [0.1], "loss": torch.tensor(1.0)}, {"grad": 7.0}, {"lr": [0.1], "loss": torch.tensor(5.0)}, ["end"]]
    assert folded(parts, 4) == [{"lr": [0.1], "loss": torch.tensor(2.0)}, {"grad": 7.0}, ["end"]]
