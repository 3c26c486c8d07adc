"""The contract table can fail: strategies that are wrong on purpose, in parts and in stages too, are caught."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from contract import broken
from contract.bench import run
from contract.in_parts import folded, uneven_parts
from contract.in_stages import all_completed, completed, of_all_ranks, together
from contract.ranks import AT_WORK, RankError, RankRuns, let_work
from contract.record import Record, Refusal, assert_same_run, differences, snapshot
from contract.rows import PLAIN, STRATEGIES, Row
from contract.scenarios import SCENARIOS
from retime.foundations.parts.combine import Certificate
from retime.mechanisms.memory_budget import sub_batches
from retime.mechanisms.memory_budget.planner import StepPlanner

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


STAGED = "optimizer_momentum"
NAN = float("nan")


def test_catches_one_rank_that_trains_wrongly(tmp_path: Path) -> None:
    ours = RankRuns("wrong_in_stages", [STAGED], tmp_path)
    try:
        ranks = all_completed(ours.records(STAGED), STAGED)
    finally:
        ours.stop()
    plain = run(PLAIN["auto"], SCENARIOS[STAGED], tmp_path / "plain")
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
    _, second = all_completed(records, STAGED)
    assert second.entries["fit 1"]["trace"] == [1.0]
    with pytest.raises(AssertionError, match="logged/0: off by nan"):
        assert_same_run(records[0], second)
    _, second = all_completed(records, "exception_in_training_step")
    assert second.entries["fit 1"]["weights"] == {"w": 1.0}
