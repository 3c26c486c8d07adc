"""`python -m retime.recipes`, end to end at tiny sizes: list, run, sweep, demo, DDP and memory in fresh processes."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retime.recipes import __main__ as command
from retime.recipes.core.results import Result, load

Command = Callable[..., None]
TINY = (
    *("hardware.cores=null", "rounds=1", "steps=1"),
    "data={_target_: retime.recipes.data.synthetic_vectors, features: 8, classes: 8}",
)
MLP = "{_target_: retime.recipes.models.mlp, depth: 2, width: 8}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command line in an empty folder, as `python -m retime.recipes` does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # of the terminal: no line is broken

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["retime.recipes", *arguments])
        command.main()

    return call


def results(folder: Path) -> dict[str, Result]:
    return {str(path.parent.relative_to(folder)): load(path) for path in sorted(folder.rglob("result.json"))}


def test_without_an_experiment_they_are_listed(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    shown = capsys.readouterr().out
    for name in command.experiments():
        assert name in shown


def test_sweep_over_an_axis_adds_points_to_one_figure(
    run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("experiment=fusion_fig4", "-m", *TINY, "~data.image_size", f"models={{mobilenet_v2: {MLP}}}", "batch_size=1,2")
    found = results(tmp_path / "results")
    assert len(found) == 1
    (result,) = found.values()
    assert [point.at["batch_size"] for point in result.points] == [1, 2]
    assert "fitted with t_grad" in capsys.readouterr().out


def test_sweep_over_a_setting_makes_a_folder_each(run: Command, tmp_path: Path) -> None:
    run("-m", "experiment=fusion_fig3", *TINY, "~data.image_size", f"model={MLP}", "batch_size=2,3")
    found = results(tmp_path / "results")
    assert [result.points[0].settings["batch_size"] for result in found.values()] == [2, 3]
    for folder, result in found.items():
        assert f"batch_size={result.points[0].settings['batch_size']}" in folder
        assert set(result.points[0].variants("step")) >= {"baseline", "fused", "retime_backward", "no_update"}
        assert (tmp_path / "results" / folder / "result.png").exists()


def test_demo_shows_identical_results(run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(
        "experiment=demo",
        *("hardware.cores=null", "rounds=1", "epochs=1", "batch_size=256"),
        *("model.depth=2", "model.width=16"),
    )
    (result,) = results(tmp_path / "results").values()
    (point,) = result.points
    assert point.facts["fused weights"] == point.facts["retime_backward weights"]
    assert point.facts["fused losses"] == point.facts["retime_backward losses"]
    assert point.values("fused", "accuracy") == point.values("retime_backward", "accuracy")
    assert point.values("retime_backward", "gradients alive") <= point.values("fused", "gradients alive")
    shown = capsys.readouterr().out
    assert "Identical result" in shown
    assert "training steps a second" in shown


def test_targets_compare_trainer_runs(run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = "cases.mlp_batch4"
    run(
        *("experiment=fusion_targets", "hardware.cores=null", "rounds=1", "steps=1"),
        *("~cases.mlp_batch64", "~cases.large_convolution"),
        *(f"{case}.model.depth=2", f"{case}.model.width=8", f"{case}.data.features=8", f"{case}.data.classes=8"),
    )
    points = {point.at["case"]: point for point in next(iter(results(tmp_path / "results").values())).points}
    assert set(points["mlp_batch4"].variants("step")) == {"baseline", "fused", "retime_backward", "retime_forward"}
    same = points["mlp_batch4"].facts["final weights bit-identical to fused"]
    assert same.endswith("fused, retime_backward, retime_forward")
    assert "mlp_batch4: retime backward over the plain strategy" in capsys.readouterr().out


def test_ddp_runs_in_a_fresh_process_with_all_its_ranks(run: Command, tmp_path: Path) -> None:
    run("experiment=fusion_ddp", *TINY, "~data.image_size", f"model={MLP}", "batch_size=2", "devices=2")
    (result,) = results(tmp_path / "results").values()
    assert [point.at["devices"] for point in result.points] == [1, 2]
    for point in result.points:
        assert "retime_backward" in point.facts["final weights bit-identical to fused"]


def test_memory_is_measured_in_a_fresh_process(run: Command, tmp_path: Path) -> None:
    run("experiment=fusion_memory", *TINY, "sizes=[2]", "model.width=8", "variants=[fused]", "batch_size=2")
    (result,) = results(tmp_path / "results").values()
    (point,) = result.points
    assert point.facts["parameters"] == 2 * (8 * 8 + 8)
    assert point.values("fused", "gradients alive") == [2 * 4 * (8 * 8 + 8) / 2**20]
