"""`make demo` in small: two processes in turns, whether weights are equal, and what is shown of made-up results."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from retime.commands.advise_turns import MethodError
from retime.commands.advise_worker import METHODS
from retime.recipes.advice import demo
from retime.recipes.advice.demo import PEAK, SPEED, STEP, Demo
from retime.recipes.advice.settings import AdviceSettings
from retime.recipes.core.results import Point, Result, Row
from support.recipes import assert_draws, settings_for
from support.time_limits import limit_s

MLP = {"_target_": "retime.recipes.models.mlp", "depth": 2, "width": 16, "in_features": 8, "num_classes": 4}
DATA = {"_target_": "retime.recipes.data.synthetic_vectors", "features": 8, "classes": 4}
CASE = {"model": MLP, "data": DATA, "batch_size": 8, "optimizer": {"_target_": "torch.optim.AdamW", "fused": True}}


def settings(methods: list[str], **more: Any) -> AdviceSettings:
    whole = settings_for("experiment=demo", "rounds=1", "steps=4")
    return replace(whole, cases={"net": {**CASE, **more, "methods": methods}}, seconds=limit_s(60))


def shown(result: Result) -> list[str]:
    stream = StringIO()
    Demo().show(result, Console(width=80, file=stream))
    return stream.getvalue().splitlines()


@pytest.mark.long
def test_two_processes_in_turns(tmp_path: Path) -> None:
    result = Demo().run(settings(["fused_optimizer"]), tmp_path, Console(quiet=True))
    (point,) = result.points
    fused = point.facts["net: fused_optimizer"]
    assert fused["weights"] == "identical"
    assert fused["trainer"] == "Trainer(strategy='fused_optimizer')"
    assert point.values("net: fused_optimizer", STEP)[0] > 0
    assert point.values("net: plain", PEAK)[0] > 0
    assert "backward fusion: " in fused["report"]
    assert_draws(Demo(), result, tmp_path, 10_000)
    assert shown(result)[-1].startswith("    trainer = Trainer(")


@pytest.mark.long
def test_a_budget_and_two_ranks(tmp_path: Path) -> None:
    methods = ["memory_budget, half", "ooo_pipeline", "ooo_ddp"]
    (point,) = Demo().run(settings(methods), tmp_path, Console(quiet=True)).points
    budget = point.facts["net: memory_budget, half"]["trainer"]
    assert budget.startswith("Trainer(strategy=retime.MemoryBudgetStrategy(budget=")
    assert point.facts["net: ooo_ddp"]["weights"] == "identical"
    assert point.facts["net: ooo_pipeline"]["weights"] in ("identical", "within tolerance")
    assert point.facts["net: ooo_ddp"]["over"] == "net: ddp"


def test_what_is_refused_says_why(tmp_path: Path) -> None:
    wrong = settings(["fused_optimizer"], optimizer={"_target_": "torch.optim.AdamW", "lr": -1.0})
    (point,) = Demo().run(wrong, tmp_path, Console(quiet=True)).points
    fact = point.facts["net: fused_optimizer"]
    assert fact["verdict"] == "left out"
    assert fact["why"].startswith("the plain training does not run: ")
    assert "Invalid learning rate: -1.0" in fact["why"]


@pytest.mark.usefixtures("_fake")
def test_plain_training_that_fails_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def refuse(*arguments: Any) -> None:
        started.append(arguments)
        raise MethodError("no memory")

    monkeypatch.setattr(demo, "Running", refuse)
    methods = ["fused_optimizer", "CPUMemoryPool", "ooo_ddp"]
    (point,) = Demo().run(settings(methods), tmp_path, Console(quiet=True)).points
    assert {point.facts[f"net: {name}"]["why"] for name in methods} == {"the plain training does not run: no memory"}
    assert len(started) == 2  # on one device, and on two ranks


class Fake:
    """Stands for processes: weights are what `weights` says of a method, a step takes what `ms` says."""

    weights: dict[str, list[float]]
    ms: dict[str, float]
    said: list[tuple[str, str]]

    def __init__(self, _: Any, request: dict[str, Any], environment: None, ranks: int, limit: Any) -> None:
        names = {id(method): name for name, method in METHODS.items()}
        self.name = "reverse" if request["reverse"] else names.get(id(request["method"]), "plain")
        self.is_busy = False

    def steps(self, limit: Any, count: int, **more: Any) -> dict[str, Any]:
        weights = np.array(Fake.weights.get(self.name, [3.0, 4.0]))
        said = Fake.said if self.name != "plain" else []
        ms = [Fake.ms.get(self.name, 10.0)] * count
        return {"ms": ms, "weights": weights, "said": said, "report": "", "peak_bytes": 2**20}

    def block(self, limit: Any, step_ms: float) -> tuple[float, int]:
        return Fake.ms.get(self.name, 10.0), 2**20

    def close(self) -> None:
        pass


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake.weights, Fake.ms, Fake.said = {}, {}, []
    monkeypatch.setattr(demo, "Running", Fake)
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _: {0, 1})


def fact_of(name: str, folder: Path) -> dict[str, Any]:
    (point,) = Demo().run(settings([name]), folder, Console(quiet=True)).points
    return point.facts[f"net: {name}"]


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize(
    ("weights", "verdict"),
    [
        ([3.0, 4.0], "identical"),
        ([3.0, 4.0 + 9e-5], "within tolerance"),
        ([3.0, 4.0 + 11e-5], "DIFFERENT"),
        ([3.0, float("nan")], "DIFFERENT"),
    ],
)
def test_weights_are_compared_with_rounding(tmp_path: Path, weights: list[float], verdict: str) -> None:
    Fake.weights = {"reverse": [3.0, 4.0 + 1e-6], "fused_optimizer": weights}
    assert fact_of("fused_optimizer", tmp_path)["weights"] == verdict


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize(("ms", "verdict"), [(8.0, "faster"), (12.0, "slower"), (10.0, "undecided")])
def test_verdicts_are_by_quartiles(tmp_path: Path, ms: float, verdict: str) -> None:
    Fake.ms = {"ooo_ddp": ms}
    assert fact_of("ooo_ddp", tmp_path)["verdict"] == verdict


@pytest.mark.usefixtures("_fake")
def test_a_method_that_does_nothing_says_why(tmp_path: Path) -> None:
    Fake.said = [("NoEffectWarning", "no CPU memory pool: there is no C++ compiler")]
    fact = fact_of("CPUMemoryPool", tmp_path)
    assert (fact["verdict"], fact["why"]) == ("no effect", "no CPU memory pool: there is no C++ compiler")


@pytest.mark.usefixtures("_fake")
def test_one_core_leaves_out_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _: {0})
    fact = fact_of("ooo_ddp", tmp_path)
    assert (fact["verdict"], fact["why"]) == ("left out", "it trains on 2 ranks, and this process may use 1 core")


@pytest.mark.parametrize(
    ("methods", "steps", "message"),
    [
        (["fusion"], 4, "cases.net.methods has 'fusion': choose from fused_optimizer"),
        ([], 2, "steps=2: give 3 or more"),
    ],
)
def test_bad_settings(tmp_path: Path, methods: list[str], steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Demo().run(replace(settings(methods), steps=steps), tmp_path, Console(quiet=True))


def made_up(**facts: dict[str, Any]) -> Result:
    """Speed by the fact's `gain`, and the rest of the fact as it is."""
    rows = [Row("a net: plain", STEP, "ms", [10.0]), Row("a net: plain", PEAK, "MiB", [100.0])]
    whole: dict[str, Any] = {"a net": "2 M parameters, 8 samples a step, AdamW", "a net: plain": "Trainer()"}
    for name, fact in facts.items():
        whole[f"a net: {name}"] = {"why": "", "over": "a net: plain", "trainer": f"Trainer(strategy={name!r})"} | fact
        if "gain" in fact:
            gain = fact["gain"]
            values = ((STEP, "ms", 10.0 / gain), (SPEED, "x", gain), (PEAK, "MiB", 50.0))
            rows += [Row(f"a net: {name}", quantity, unit, [value]) for quantity, unit, value in values]
    hardware = {"processor": "some processor with a name", "cores": "2"}
    return Result("demo", "", "", "", "", [Point({}, {"rounds": 7, "steps": 30}, rows, whole, hardware)])


FAST = {"gain": 1.25, "verdict": "faster", "weights": "identical"}
SLOW = {"gain": 0.8, "verdict": "slower", "weights": "within tolerance", "difference": 2e-6, "rounding": 1e-6}
GONE = {"verdict": "left out", "why": "it trains on 2 ranks, and this process may use 1 core" + ", at length" * 9}


def test_what_is_shown_fits_80_columns_and_ends_with_the_line_to_paste(tmp_path: Path) -> None:
    result = made_up(fused_optimizer_forward=FAST, ooo_single_device=SLOW, ooo_ddp=GONE)
    lines = shown(result)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert rows["plain"] == ["10.0", "ms", "100", "MiB"]
    assert rows["fused_optimizer_forward"] == ["8.0", "ms", "1.25", "faster", "50", "MiB", "identical"]
    assert rows["ooo_single_device"] == ["12.5", "ms", "0.80", "slower", "50", "MiB", "within", "tolerance"]
    text = " ".join(" ".join(lines).split())
    assert "ooo_ddp, left out: it trains on 2 ranks" in text
    assert "two plain trainings by 1e-06" in text
    assert "What is slower here, or takes more memory, pays" in text
    assert lines[-1] == "    trainer = Trainer(strategy='fused_optimizer_forward')"
    assert demo.claim(result.points[0]) == (
        "1 of 2 methods train faster than plain torch, 2 in less memory; weights: 1 identical, 1 within tolerance"
    )
    assert_draws(Demo(), result, tmp_path, 10_000)


def test_different_weights_are_a_bug() -> None:
    lines = shown(made_up(ooo_ddp={**SLOW, "weights": "DIFFERENT"}))
    assert any("DIFFERENT weights are a bug" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "    trainer = Trainer()"


def test_where_nothing_could_be_measured(tmp_path: Path) -> None:
    result = made_up(ooo_ddp=GONE)
    assert any("ooo_ddp, left out" in line for line in shown(result))
    assert_draws(Demo(), result, tmp_path)
