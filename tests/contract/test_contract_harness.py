"""The contract table can fail: strategies that are wrong on purpose are caught, on one rank and on two."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from contract import broken
from contract.bench import run
from contract.ranks import AT_WORK, RankError, RankRuns, let_work
from contract.record import Record, Refusal, assert_same_run, differences, snapshot
from contract.rows import PLAIN, Row
from contract.scenarios import SCENARIOS

CAUGHT = [
    (broken.ScalesGradients, "optimizer_sgd"),
    (broken.ScalesGradients, "accumulate_with_short_last_window"),
    (broken.SkipsAStep, "optimizer_adam"),
    (broken.UpdatesLate, "ema_home_made"),
    (broken.UpdatesLate, "weight_norm_logged_each_batch"),
    (broken.UpdatesLate, "lr_set_after_batch"),
    (broken.UpdatesLate, "exception_after_a_batch"),
    (broken.UpdatesLate, "validation_mid_epoch"),
    (broken.ForgetsState, "checkpoints_mid_epoch"),
    (broken.ForgetsState, "plain_resumes_ours"),
    (broken.LeavesAHook, "bare_loop_after_fit"),
    (broken.LeavesAHook, "fit_ours_then_plain"),
]


@pytest.mark.parametrize(("strategy", "scenario"), CAUGHT, ids=lambda value: getattr(value, "__name__", value))
def test_catches(strategy: type[SingleDeviceStrategy], scenario: str, tmp_path: Path) -> None:
    plain = run(PLAIN["auto"], SCENARIOS[scenario], tmp_path / "plain")
    ours = run(Row("broken", lambda _: strategy("cpu")), SCENARIOS[scenario], tmp_path / "broken")
    with pytest.raises(AssertionError, match="differs from the plain one"):
        assert_same_run(plain, ours)


@pytest.mark.parametrize(
    ("row", "traits", "message"),
    [
        (broken.SILENTLY_OFF, frozenset(), "fusion was off in fit 1"),
        (broken.NEVER_OFF, frozenset({"a trait"}), "fusion was on with a trait"),
        (broken.OFF_WITHOUT_WARNING, frozenset({"a trait"}), "nothing warned"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_catches_a_mechanism_that_is_silently_off_or_on(
    row: Row, traits: frozenset[str], message: str, tmp_path: Path
) -> None:
    record = run(row, SCENARIOS["optimizer_sgd"], tmp_path)
    with pytest.raises(AssertionError, match=message):
        row.check_activity(traits, record)


def test_catches_ranks_that_differ_fail_or_hang(tmp_path: Path) -> None:
    names = ["optimizer_sgd", "optimizer_momentum", "optimizer_adam"]
    ours = RankRuns("fails_on_one_rank", names, tmp_path, scenario_s=3.0)
    try:
        first, second = ours.records("optimizer_sgd")
        with pytest.raises(AssertionError, match="differs from the plain one"):
            assert_same_run(first, second)
        with pytest.raises(RankError, match="rank 1 broke"):
            ours.records("optimizer_adam")
        with pytest.raises(RankError, match="the process hung or died"):
            ours.records("optimizer_momentum")
    finally:
        ours.stop()


def test_ranks_that_fail_while_others_are_waited_for_fail_by_their_own_name(tmp_path: Path) -> None:
    names = "fails_on_one_rank", "plain_ddp"
    fails, healthy = rows = [RankRuns(name, ["optimizer_sgd", "optimizer_adam"], tmp_path / name) for name in names]
    at_work = []
    healthy.meanwhile = lambda: (let_work(rows), at_work.append(sum(one.works for one in rows)))
    try:
        assert all(isinstance(one, Record) for one in healthy.records("optimizer_adam"))
        assert 1 <= max(at_work) <= AT_WORK
        with pytest.raises(RankError, match="rank 1 broke"):
            fails.records("optimizer_adam")
    finally:
        for one in rows:
            one.stop()


def test_catches_a_refusal_on_one_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"all": [Refusal("is sparse"), Refusal("is sparse")], "one": [Record(), Refusal("is sparse")]}
    monkeypatch.setattr(RankRuns, "_run_all", lambda _, results: results.update(ranks))
    ours = RankRuns("a_row", [*ranks], tmp_path)
    with pytest.raises(RankError, match="is sparse"):
        ours.records("all")
    with pytest.raises(RankError, match=r"^only rank 1 ended with the error"):
        ours.records("one")


@pytest.mark.parametrize(
    ("traits", "error", "refuses"),
    [
        (frozenset({"sparse"}), ValueError("it is sparse"), True),
        (frozenset({"sparse"}), ValueError("something else"), False),
        (frozenset({"sparse"}), TypeError("it is sparse"), False),
        (frozenset(), ValueError("it is sparse"), False),
    ],
)
def test_only_the_error_of_a_trait_is_its_refusal(traits: frozenset[str], error: Exception, refuses: bool) -> None:
    assert Row("a_row", lambda _: "auto", refused={"sparse": "is sparse"}).refuses(traits, error) is refuses


@pytest.mark.parametrize(
    ("plain", "ours", "found"),
    [
        (torch.ones(2), torch.ones(2), ""),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), ""),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "off by 0 in 0 of 1"),
        (torch.ones(2), torch.ones(2).double(), "float32 .* retimed torch.float64"),
        (torch.ones(2), torch.ones(1), "retimed torch.float32"),
        (torch.ones(2), torch.tensor([1.0, 1.0 + 2**-23]), "off by 1.19e-07 in 1 of 2"),
        ({"a": 1, "b": 2}, {"a": 1}, "/b: only the plain run has it"),
        ([1, 2], [1], "2 items, retimed 1"),
        (0.1, 0.1 + 1e-16, "off by"),
        (1, True, "1, retimed True"),
        (None, 0, "None, retimed 0"),
    ],
)
def test_differences(plain: object, ours: object, found: str) -> None:
    lines = list(differences(snapshot(plain), snapshot(ours)))
    if found:
        (line,) = lines
        assert re.search(found, line)
    else:
        assert not lines


def test_tolerance_is_for_floating_point_only() -> None:
    near, far = Record({"weight": torch.tensor(1.0)}), Record({"weight": torch.tensor(1.001)})
    assert_same_run(near, far, tolerance=0.01)
    with pytest.raises(AssertionError, match="weight: off by"):
        assert_same_run(near, far, tolerance=1e-4)
    with pytest.raises(AssertionError, match="step: 3, retimed 4"):
        assert_same_run(Record({"step": 3}), Record({"step": 4}), tolerance=1.0)
