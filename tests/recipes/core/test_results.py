"""Results on disk: finished points are kept, interrupted runs continue, reports come from the JSON alone."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from retime.recipes import report
from retime.recipes.core import machine
from retime.recipes.core.recipe import Measured, recipe_of
from retime.recipes.core.results import Result, Row, load
from retime.recipes.core.schema import Hardware
from retime.recipes.fusion.figures import Optimizers, SavedTime
from retime.recipes.fusion.settings import FusionSettings
from retime.recipes.fusion.variants import PHASES

QUIET = Console(quiet=True)
VARIANTS = {"baseline": 10.0, "fused": 8.0, "retime_backward": 7.0, "retime_forward": 8.5, "no_update": 6.0}


class Counting(SavedTime):
    """Figure 4 without its measuring: says what it was asked for and answers with made-up times."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fail_at: int | None = None

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Any) -> Measured:
        size = at["batch_size"]
        if size == self.fail_at:
            raise KeyboardInterrupt
        self.asked.append(size)
        tick("block")
        return made_up(size)


def made_up(size: int = 4) -> Measured:
    rows = [
        Row(name, phase, "ms", [(ms + size) * part, (ms + size) * part * 1.1])
        for name, ms in VARIANTS.items()
        for phase, part in zip((*PHASES, "step"), (0.3, 0.5, 0.2, 1.0), strict=True)
    ]
    return Measured(rows, {"parameters": 100, "parameters per layer": 10})


@pytest.fixture
def settings() -> FusionSettings:
    return FusionSettings(
        name="fusion_fig4",
        title="Time saved",
        paper="optimizer-fusion",
        where="Figure 4",
        recipe="retime.recipes.fusion.figures.SavedTime",
        hardware=Hardware("cpu", "cpu", None),
        models={"small": {"_target_": "retime.recipes.models.mlp"}},
        batch_sizes=[1, 4, 16],
        variants=[*VARIANTS],
    )


def test_finished_points_are_not_measured_again(settings: FusionSettings, tmp_path: Path) -> None:
    recipe = Counting()
    recipe.run(settings, tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16]
    recipe.run(settings, tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16]
    recipe.run(dataclasses.replace(settings, rerun=True, batch_sizes=[4]), tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16, 4]
    recipe.run(dataclasses.replace(settings, batch_sizes=[1, 64]), tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16, 4, 64]  # one more point of the same figure
    assert sorted(point.at["batch_size"] for point in load(tmp_path / "result.json").points) == [1, 4, 16, 64]


@pytest.mark.parametrize("change", [{"seed": 1}, {"rounds": 3}, {"models": {"small": {"_target_": "other"}}}])
def test_changed_settings_and_another_machine_measure_again(
    settings: FusionSettings, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Counting()
    recipe.run(settings, tmp_path, QUIET)
    recipe.run(dataclasses.replace(settings, **change), tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16] * 2
    monkeypatch.setattr("retime.recipes.core.machine.hardware", lambda: {"processor": "another"})
    recipe.run(dataclasses.replace(settings, **change), tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16] * 3


def test_a_point_keeps_its_former_measurements(settings: FusionSettings, tmp_path: Path) -> None:
    recipe = Counting()
    first = recipe.run(dataclasses.replace(settings, batch_sizes=[1, 4]), tmp_path, QUIET)
    again = dataclasses.replace(settings, rerun=True, batch_sizes=[4])
    recipe.run(dataclasses.replace(again, rounds=3), tmp_path, QUIET)
    recipe.run(dataclasses.replace(again, seed=1), tmp_path, QUIET)
    recipe.run(again, tmp_path, QUIET)
    result = load(tmp_path / "result.json")
    one, four = result.points
    assert (one.former, [old.settings["seed"] for old in four.former]) == ([], [0, 0, 1])
    assert four.former[0] == first.points[1]
    assert [[old.settings["rounds"] for old in each.points] for each in result.before()] == [[3], [7]], "newest first"
    text = report.markdown(result, recipe)
    oldest, few, other = (f"before {old.finished[:10]}" for old in four.former)
    assert f"batch_size=4 ({four.finished[:10]}; {other}; {oldest})" in text
    assert f"rounds 3, steps 5: model=small batch_size=4 ({few})" in text, "by its own words"
    four.facts["new"] = 1
    four.rows.append(Row("new", "step", "ms", [1.0]))
    assert len(result.before()) == 2, "what a recipe has got since makes no other measurement of it"


def test_how_a_gpu_was_is_a_fact(settings: FusionSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["345 MHz, 1980 MHz, 31, 70 W", "1755 MHz, 1980 MHz, 63, 640 W"]
    answers = iter(said)
    monkeypatch.setattr(machine, "_printed", lambda *command: next(answers) if command[0] == "nvidia-smi" else "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(machine, "hardware", dict)
    result = Counting().run(dataclasses.replace(settings, batch_sizes=[4]), tmp_path, QUIET)
    assert result.points[0].facts["GPUs before and after"] == said


def test_a_recipe_that_has_moved_keeps_its_points(settings: FusionSettings, tmp_path: Path) -> None:
    recipe = Counting()
    moved = dataclasses.replace(settings, recipe="retime.recipes.fusion.gone.SavedTime")
    result = recipe.run(moved, tmp_path, QUIET)
    assert type(recipe_of(result)) is SavedTime
    recipe.run(settings, tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16]
    with pytest.raises(ImportError, match="gone"):
        recipe_of(dataclasses.replace(result, name="mine"))


def test_an_interrupted_run_continues(settings: FusionSettings, tmp_path: Path) -> None:
    recipe, console = Counting(), Console(record=True, width=300)
    recipe.fail_at = 16
    with pytest.raises(KeyboardInterrupt):
        recipe.run(settings, tmp_path, console)
    assert f"stopped; the same command goes on behind the points in {tmp_path}/result.json" in console.export_text()
    recipe.fail_at = None
    recipe.run(settings, tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16]


def test_report_is_rebuilt_from_json_alone(settings: FusionSettings, tmp_path: Path) -> None:
    folder = tmp_path / "optimizer-fusion" / "figure-4" / "cpu"
    Counting().run(settings, folder, QUIET)
    report.main([str(tmp_path)])
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(made) == ["result.csv", "result.json", "result.md", "result.png"]
    for name in ("result.csv", "result.md", "result.png"):
        (folder / name).unlink()
    report.main([str(tmp_path)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made

    lines = made["result.csv"].decode().splitlines()
    assert lines[0] == "model,batch_size,variant,quantity,unit,median,quartile_low,quartile_high,rounds"
    assert len(lines) == 1 + 3 * len(VARIANTS) * (len(PHASES) + 1)
    text = made["result.md"].decode()
    assert "optimizer-fusion, section 1" in text
    assert "t_saved = 3.15 ms (retime backward)" in text  # medians of the made-up times: 1.05 * (10 - 7)
    point = json.loads(made["result.json"])["points"][0]
    assert {"hardware", "versions", "commit", "rows", "settings", "finished"} <= set(point)


def test_report_of_a_figure_with_named_points(settings: FusionSettings, tmp_path: Path) -> None:
    class Made(Optimizers):
        def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Any) -> Measured:
            return made_up()

    recipe = "retime.recipes.fusion.figures.Optimizers"
    settings = dataclasses.replace(settings, recipe=recipe, optimizers={"SGD": {}, "Adam": {}})
    Made().run(settings, tmp_path, QUIET)
    console = Console(record=True, width=160)
    report.rebuild(tmp_path, console)
    assert (tmp_path / "result.png").stat().st_size > 10_000
    shown = console.export_text()
    assert "Optimizer's share of the default step: SGD 20.00 %, Adam 20.00 %." in shown
    assert "speed over the strongest peer (fused)" in shown


def test_simulated_results_say_so(tmp_path: Path) -> None:
    result = Result("x", "retime.recipes.fusion.figures.SavedTime", "paper", "Figure 1", "title", simulated=True)
    result.save(tmp_path)
    assert "Simulated, not measured" in report.markdown(load(tmp_path / "result.json"), SavedTime())


def test_other_layouts_and_empty_folders_are_refused(settings: FusionSettings, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run an experiment first"):
        report.rebuild(tmp_path)
    Counting().run(settings, tmp_path / "whole", QUIET)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"other/result\.json: ValueError: .* Measure it again"):
        report.rebuild(tmp_path)
    assert (tmp_path / "whole" / "result.md").exists(), "it goes on behind that"


def test_recording_from_a_changed_tree_is_refused_before_anything_is_measured(
    settings: FusionSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retime.recipes.core.machine.commit", lambda: "abc+changes")
    recipe = Counting()
    with pytest.raises(ValueError, match="allow_dirty=true"):
        recipe.run(dataclasses.replace(settings, record=True), tmp_path, QUIET)
    assert (recipe.asked, list(tmp_path.iterdir())) == ([], [])
    recipe.run(dataclasses.replace(settings, record=True, allow_dirty=True), tmp_path, QUIET)
    assert recipe.asked == [1, 4, 16]
    text = report.markdown(load(tmp_path / "result.json"), recipe)
    assert text.splitlines()[2].startswith("**Measured with changes that were not committed")
    recipe.run(settings, tmp_path / "outputs", QUIET)  # what is not recorded may come from any tree
    assert recipe.asked == [1, 4, 16] * 2


def test_points_name_cores_as_pinned_and_the_load(settings: FusionSettings, tmp_path: Path) -> None:
    Counting().run(dataclasses.replace(settings, hardware=Hardware("cpu", "cpu", 1)), tmp_path, QUIET)
    point = load(tmp_path / "result.json").points[0]
    assert (point.hardware["cores"], point.hardware["threads"]) == ("1", "1 threads")
    assert len(point.load) == 2


def test_what_disturbs_a_measurement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [(7, "calm", 20.0), (8, "make", 96.6), (os.getpid(), "we", 99.0), (9, "hidden", None)]
    there = [SimpleNamespace(pid=pid, info={"name": name, "cpu_percent": share}) for pid, name, share in shares]
    monkeypatch.setattr("psutil.process_iter", lambda attributes: there)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 9.0, 9.0))
    assert machine.disturbances(0) == ["make (8) takes 97 % of a core"]
    monkeypatch.setattr("os.getloadavg", lambda: (1.504, 0.0, 0.0))
    assert machine.disturbances(0) == ["load 1.5 over a minute", "make (8) takes 97 % of a core"]


def test_recorded_results_are_no_changes_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="" if command[1] == "status" else "abc\n")

    monkeypatch.setattr("subprocess.run", answer)
    assert machine.commit() == "abc"
    (status,) = [command for command in asked if command[1] == "status"]
    assert status[-1] == ":(top,exclude)results"
