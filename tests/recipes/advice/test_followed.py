"""Recipe `advise` in small: advice of a tiny model, training by it, and what the report says of made-up results."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from retime.recipes.advice import followed
from retime.recipes.advice.followed import ADVISED, DDP, ON_RANKS, PLAIN, STEP, Followed
from retime.recipes.advice.settings import AdviceSettings
from retime.recipes.core.results import Point, Result, Row
from support.recipes import fork_workers, ran, settings_for
from support.time_limits import limit_s


@pytest.fixture
def settings() -> AdviceSettings:
    whole = settings_for("experiment=advise", "processes=1", "steps=2", "seconds=60")
    case = whole.cases["MLP"]
    model = {**case["model"], "depth": 2, "width": 32}
    return replace(whole, cases={"MLP": {**case, "model": model}}, timeout_s=limit_s(120))


def advice(advised: str | None, on_ranks: str | None = None) -> dict:
    plain = {"strongest": {"threads": 1, "fused": True, "kept_heap": True}, "ddp_tried_ms": {"25": 8.0, "5": 7.0}}
    row = {"name": "fused_optimizer", "strategy": "fused_optimizer", "arguments": {}, "callback": "", "ranks": False}
    row |= {"threads": 1, "kept_heap": True, "gain": {"median": 1.1, "low": 1.08, "high": 1.12}}
    ddp = {**row, "name": "fused_optimizer_ddp", "strategy": "fused_optimizer_ddp", "ranks": True}
    return {"plain": plain, "methods": [row, ddp], "advised": advised, "advised_on_ranks": on_ranks}


def test_training_as_advised(settings: AdviceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "_advice", lambda *_: advice("fused_optimizer"))
    monkeypatch.setattr(followed, "_WARM_STEPS", 2)
    fork_workers(monkeypatch, followed)
    recipe = Followed()
    result = ran(recipe, settings, tmp_path)
    (point,) = result.points
    assert point.variants(STEP) == [PLAIN, ADVISED]


@pytest.mark.long
def test_training_as_advised_for_ranks(
    settings: AdviceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "_advice", lambda *_: advice(None, "fused_optimizer_ddp"))
    recipe = Followed()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    (point,) = result.points
    assert point.variants(STEP) == [PLAIN, DDP, ON_RANKS]
    over, _ = lines = recipe.compare(result)[1:]
    assert all(line.note.startswith("MLP: fused_optimizer_ddp, over ddp: named 1.100, trained ") for line in lines)
    assert over.measured == point.speedup(DDP, ON_RANKS, STEP)
    assert recipe.notes(result)[-1] == "- MLP, on two ranks: fused_optimizer_ddp"


def made_up(plain: list[float], advised: list[float]) -> Result:
    rows = [Row(PLAIN, STEP, "ms", plain), Row(ADVISED, STEP, "ms", advised)]
    facts = {"seconds": 120.0, "advice": advice("fused_optimizer")}
    return Result("advise", "", "", "", "", [Point({"case": "MLP"}, {}, rows, facts)])


def test_the_gain_is_held_against_what_was_named() -> None:
    held = Followed().compare(made_up([11.0, 11.0], [10.0, 10.0]))
    assert [line.against.met(line.measured.median) for line in held] == [True, True, True]
    lost = Followed().compare(made_up([10.0, 10.0], [11.0, 11.0]))
    assert [line.against.met(line.measured.median) for line in lost] == [True, False, False]
    assert "named 1.100, trained 0.909" in lost[-1].note


def test_a_gain_by_training_that_spreads_around_what_was_named_is_not_off_for_sure() -> None:
    unsteady = made_up([10.0] * 5, [11.0] * 5)
    unsteady.points[0].facts["advice"]["methods"][0]["is_steady"] = False
    assert "size undecided" in Followed().compare(unsteady)[-1].note
    for plain, reach in (([11.0, 10.8, 11.6, 11.0, 12.0], (0.0, 1.16 / 1.1 - 1)), ([12.0] * 5, (12 / 11 - 1,) * 2)):
        *_, off = Followed().compare(made_up(plain, [10.0] * 5))
        assert off.measured.reach == pytest.approx(reach)


@pytest.mark.long
def test_the_command_is_asked(settings: AdviceSettings) -> None:
    said: list[str] = []
    no_layers = "convert (scan modules)"  # of this model: no more processes than the plain step's are started
    found = followed._advice(settings.cases["MLP"], limit_s(60), said.append, "--only", no_layers)
    assert found["plain"]["step_ms"] > 0
    assert any("strongest plain step" in line for line in said)
    assert [row["verdict"] for row in found["methods"]] == ["does not apply"]
