"""BPPSA's recurrent recipes: small runs of each, what they count, and the paper's numbers."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console

from retime.mechanisms.scan import backward
from retime.recipes.bppsa import recurrent
from retime.recipes.bppsa import recurrent_figures as figures
from retime.recipes.bppsa.settings import RecurrentSettings, of_epochs
from retime.recipes.bppsa.training import batches
from retime.recipes.core.claims import paper
from retime.recipes.core.measure import PhaseClock
from retime.recipes.core.results import Point, load
from retime.recipes.core.schema import Hardware
from retime.recipes.data import bitstreams, synthetic_irmas
from retime.recipes.models import recurrent_classifier
from retime.recipes.report import rebuild

CPU = torch.device("cpu")
ADAM = {"_target_": "torch.optim.Adam", "lr": 0.001}


def settings(recipe, **options):
    common = {
        "name": "x",
        "title": "title",
        "paper": "bppsa",
        "where": "Figure",
        "recipe": f"{recipe.__module__}.{recipe.__name__}",
        "hardware": Hardware("cpu", "cpu", 1),
        "rounds": 2,
        "steps": 1,
        "batch_size": 2,
        "sequence_length": 20,
        "model": {"_target_": "retime.recipes.models.recurrent_classifier", "hidden_size": 4, "num_classes": 11},
        "data": {"_target_": "retime.recipes.data.bitstreams", "length": 8},
        "optimizer": ADAM,
        "variants": ["baseline", "auto", "blelloch"],
    }
    return RecurrentSettings(**{**common, **options})


def run(recipe, folder, **options):
    """The result of a small run, after its report has been written."""
    recipe().run(settings(recipe, **options), folder, Console(quiet=True))
    rebuild(folder)
    assert {path.name for path in folder.iterdir()} == {f"result.{kind}" for kind in ("json", "csv", "png", "md")}
    assert (folder / "result.png").stat().st_size > 10_000
    return load(folder / "result.json"), (folder / "result.md").read_text()


# --- parts


@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_variants_train_the_same_network(cell):
    model = recurrent_classifier(cell, input_size=1, hidden_size=4)
    data = bitstreams(steps=12, length=4)
    batch = data.inputs, data.targets
    loops = {name: recurrent.TrainingLoop(name, model, ADAM, batch) for name in ("baseline", "chunk", "blelloch")}
    assert [type(loop.model.recurrent).__name__ for loop in loops.values()] == [cell, f"Scan{cell}", f"Scan{cell}"]
    assert max(recurrent.gradient_differences(loops, batch).values()) < 1e-4
    losses = {name: [float(loop.step(batch)) for _ in range(3)] for name, loop in loops.items()}
    assert losses["chunk"] == pytest.approx(losses["baseline"], rel=1e-4)
    assert losses["baseline"][2] < losses["baseline"][0]
    assert len(loops["chunk"].block(2)) == 4


def test_unknown_cells_are_refused():
    with pytest.raises(ValueError, match="cell='QRNN' is unknown: choose one of 'RNN', 'GRU', 'LSTM'"):
        recurrent_classifier("QRNN")


@pytest.mark.parametrize("data", [bitstreams(steps=3, length=10), synthetic_irmas(length=10)])
def test_batches_are_the_same_for_every_variant_and_cover_an_epoch(data):
    one, other = ([*islice(batches(data, 4, 0, CPU), 4)] for _ in range(2))
    assert [inputs.tolist() for inputs, _ in one] == [inputs.tolist() for inputs, _ in other]
    assert {targets.shape for _, targets in one} == {(4,)}
    assert not torch.equal(one[0][0], one[2][0])  # the next epoch has another order
    with pytest.raises(ValueError, match="batch_size=11, but the data set has only 10 examples"):
        next(batches(data, 11, 0, CPU))


def test_long_curves_are_stored_as_means_of_windows():
    assert figures.thinned([1.0, 2.0]) == [1.0, 2.0]
    stored = figures.thinned([float(k) for k in range(1001)])
    assert stored[:2] == [1.0, 4.0]
    assert len(stored) == 334
    assert figures.thinned([float(k) for k in range(1001)], last=True)[-1] == 1000.0
    # and drawn as those of neighbours
    assert figures.smoothed([4.0, 2.0, 3.0, 1.0], 2) == [4.0, 3.0, 2.5, 2.0]
    assert figures.smoothed([4.0, 2.0], 1) == [4.0, 2.0]


def test_auto_is_called_by_the_solver_that_ran():
    assert recurrent.label("auto", Point({}, {}, [], {recurrent.RAN: "sequential"})) == "auto: one loop (sequential)"
    assert recurrent.label("auto", Point({}, {}, [])) == recurrent.label("auto") == "auto: a scan or one loop"
    layer = recurrent_classifier("RNN").recurrent
    assert [recurrent.solver_taken(layer, torch.zeros(steps, 2, 1)) for steps in (1000, 4)] == ["chunk", "torch's own"]


def test_long_sequences_have_short_blocks():
    some = settings(figures.Scaling, steps=3)
    assert [figures.steps_for(some, length) for length in (10, 1000, 3000, 30000)] == [60, 3, 1, 1]


def test_the_papers_tables_say_what_its_text_says():
    longest = of_epochs("Table 4", "RNN, T=1000, B=16")
    assert longest["step"].value == pytest.approx(1.82, abs=0.01)
    assert longest["backward"].value == pytest.approx(8.0, abs=0.1)
    assert of_epochs("Table 5", "RNN, T=1000, B=16")["step"].value == longest["step"].value
    prepared = of_epochs("Table 6", "GRU, L, B=16")["backward"].value
    assert prepared == pytest.approx((11.43 - 5.78) / (6.91 - 6.06))
    gains = [of_epochs("Table 4", what)["backward"].value for what in paper("bppsa").tables["Table 4"]]
    assert max(gains) == pytest.approx(52.8, abs=0.1)
    assert of_epochs("Table 4", "RNN, T=1, B=16") == {}


# --- recipes


def test_figure_8(tmp_path: Path):
    result, text = run(figures.Scaling, tmp_path / "r", sequence_lengths=[10, 20], batch_sizes=[1, 2])
    assert [point.at for point in result.points] == [{"T": 10, "B": 2}, {"T": 20, "B": 2}, {"T": 20, "B": 1}]
    assert [point.at["T"] for point in figures.along(result, "T")] == [10, 20]
    assert [point.at["B"] for point in figures.along(result, "B")] == [2, 1]
    assert "bppsa, Table 4" in text
    assert "108.0 x" in text
    assert "a backward pass that took no time" in text
    assert "Largest relative difference of any gradient" in text
    for point in result.points:
        assert point.variants("step") == ["baseline", "auto", "blelloch"]


def test_figure_9(tmp_path: Path):
    data = {"_target_": "retime.recipes.data.synthetic_irmas", "length": 4}
    result, text = run(figures.Instruments, tmp_path / "r", features=["S"], batch_sizes=[2, 16], data=data)
    assert [point.facts["time steps"] for point in result.points] == [259, 259]
    assert "bppsa, Table 6 | GRU, S, B=16, whole step (V100)" in text
    assert "13.40 x" in text or "13.4 x" in text
    point = result.points[1]
    parts = [point.values(figures.ALONE, part) for part in ("forward", figures.GATES, figures.JACOBIANS)]
    added = [sum(ms) / plain for *ms, plain in zip(*parts, point.values(figures.PLAIN_ALONE, "forward"), strict=True)]
    assert point.values(figures.ALONE, figures.OVERHEAD) == pytest.approx([100 * (one - 1) for one in added])
    assert text.count("bppsa, Table 6 | GRU, S, B=16, overhead (V100) | 26.51 %") == 1  # 2.1 over 1.66 seconds
    assert "% of torch.nn's forward pass" in text


def test_gates_and_jacobians_are_timed_in_every_window(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backward, "LEAST_STEPS", 10)
    monkeypatch.setattr(backward, "WINDOW_BYTES", 0)
    layer, clock = recurrent_classifier("GRU").recurrent, PhaseClock(CPU)
    assert len(recurrent.LayerLoop(figures.Marks(clock), layer, 40, 2, clock).block(1)) == 1 + 2 * 4 + 1 + 1


def test_figure_7(tmp_path: Path):
    result, text = run(figures.Curves, tmp_path / "r", rounds=3, steps=2)
    (point,) = result.points
    assert len(point.facts["auto losses"]) == 6
    assert point.facts["auto seconds"] == sorted(point.facts["auto seconds"])
    assert point.facts["auto losses"] == pytest.approx(point.facts["baseline losses"], rel=1e-4)
    assert "2.730 x" in text
    assert "torch.nn's steps took" in text


@pytest.mark.long
def test_figure_13(tmp_path: Path):
    some = {"data": {"_target_": "retime.recipes.data.synthetic_irmas", "length": 32}, "variants": ["baseline", "auto"]}
    result, text = run(figures.InstrumentCurves, tmp_path / "r", features=["S", "M"], batch_size=32, **some)
    assert [point.at["features"] for point in result.points] == ["S", "M"]
    assert "Table 6 | GRU, M, B=32, backward (V100)" in text


def test_targets(tmp_path: Path):
    cases = {
        "rnn_batch16": {"hardware": "cpu", "cell": "RNN", "length": 20, "batch_size": 2},
        "cudnn_batch1": {"hardware": "cuda", "cell": "RNN", "length": 20, "batch_size": 2},
        "grid_gru": {
            "kind": "grid",
            "cell": "GRU",
            "lengths": [5, 10],
            "batch_sizes": [1, 4],
            "hidden_sizes": [3],
            "most_states": 60,
        },
    }
    result, text = run(recurrent.Targets, tmp_path / "r", cases=cases)
    speed, grid = result.points
    assert [point.at["case"] for point in result.points] == ["rnn_batch16", "grid_gru"]
    assert speed.has(recurrent.BASELINE, "backward")
    assert grid.facts["left out, more states than most_states"] == ["T=10 B=4 H=3"]
    assert set(grid.facts["auto chose"]) == {"T=5 B=1 H=3", "T=5 B=4 H=3", "T=10 B=1 H=3"}
    worst = recurrent.speeds_of(grid)[0]
    assert worst.variant in {"T=5 B=1 H=3", "T=5 B=4 H=3", "T=10 B=1 H=3"}
    assert worst.spread.median == min(row.spread.median for row in grid.rows if row.quantity == "speed")
    assert "RNN, T=20, B=2, H=20: backward over torch.nn's | ≥ 2.000 x" in text
    assert "at the worst shape | ≥ 0.950 x" in text


def test_an_unknown_kind_of_case_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="kind='speeed' is unknown: choose speed or grid"):
        run(recurrent.Targets, tmp_path / "r", cases={"a": {"kind": "speeed"}})


def test_from_the_command_line(run: Callable[..., Path]):
    overrides = ["rounds=1", "warmup_rounds=0", "steps=1", "sequence_lengths=[5,10]", "batch_sizes=[]", "batch_size=2"]
    found = run("experiment=bppsa_fig8", *overrides)
    assert "outputs/bppsa/figure-8/cpu/" in found.as_posix()
    assert [point.at for point in load(found).points] == [{"T": 5, "B": 2}, {"T": 10, "B": 2}]
    assert figures.along(load(found), "B") == []
