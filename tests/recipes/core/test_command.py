"""`python -m retime.recipes`, end to end at tiny sizes: list, run, sweep, DDP and memory in fresh processes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

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
def run(command_line: Command) -> Command:
    return command_line


def results(folder: Path) -> dict[str, Result]:
    return {str(path.parent.relative_to(folder)): load(path) for path in sorted(folder.rglob("result.json"))}


def test_without_an_experiment_they_are_listed(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    shown = capsys.readouterr().out
    for name in command.experiments():
        assert name in shown


@pytest.mark.long
def test_all_are_those_of_papers_that_the_hardware_runs(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everywhere, on_a_gpu = set(command.of_papers()), set(command.of_papers("cuda"))
    assert everywhere - on_a_gpu >= {"ooo_fig4", "cpuacc_update", "cpuacc_table4", "cpu_memory_targets", "modnn_fig9"}
    assert on_a_gpu >= {"cpuacc_fig3", "cpuacc_training", "cpuacc_targets", "cpuacc_memory", "fusion_fig3"}
    assert not everywhere & {"report", "demo", "advise"}
    monkeypatch.setattr(command, "of_papers", lambda *hardware: ["ooo_fig4", "fusion_ddp", "ooo_fig6", *hardware])
    monkeypatch.setattr(command, "disturbances", lambda: [])

    def refuse(*given: object) -> None:
        raise ValueError("[not] here")

    monkeypatch.setattr("retime.recipes.fusion.trainer.Distributed.points", refuse)
    run("experiment=all", "minutes=0")
    assert capsys.readouterr().out.endswith("experiment=all: 2 points of 2 experiments are left\n")
    run("experiment=all")
    shown = capsys.readouterr().out
    assert "fusion_ddp is left out: ValueError: [not] here\n" in shown
    assert shown.endswith("experiment=all: 0 points of 2 experiments are left\n")
    assert shown.index("took when recorded") < shown.index("ooo_fig4: measured in")
    assert "not quiet" not in shown
    assert {result.name for result in results(tmp_path / "outputs").values()} == {"ooo_fig4", "ooo_fig6"}


def test_all_are_listed_with_what_is_kept_durations_and_needs(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["ooo_fig4", "ooo_ksweep", "ooo_pipeline_targets"]
    on_a_gpu = ["ooo_fig7_compiled", "fusion_fig3", "fusion_ddp", "modnn_fig17"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(command, "of_papers", lambda *hardware: names if not hardware else on_a_gpu)
    monkeypatch.setattr(command, "disturbances", lambda: ["load 3", "[make] (8) takes 97 % of a core"])
    run("experiment=ooo_fig4")
    ((place, result),) = results(tmp_path / "outputs").items()
    replace(result, points=[replace(result.points[0], seconds=300.0)]).save(tmp_path / "results" / place)
    capsys.readouterr()
    run("experiment=all", "list=true", "rerun=false")
    run("experiment=all", "list=true", "hardware=cuda")
    lines = capsys.readouterr().out.splitlines()
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")] == [
        ["ooo_fig4", "1", "1", "5 min", ""],
        ["ooo_ksweep", "1", "0", "not recorded", "root"],
        ["ooo_pipeline_targets", "3", "0", "not recorded", "root"],
        ["fusion_fig3", "1", "0", "not recorded", "GPU"],
    ]
    few = "devices=2: each rank needs a GPU, and there are 1; choose fewer"
    reasons = {"ooo_fig7_compiled": "ooo_fig7_compiled has no case with device: cuda: choose hardware=cpu"}
    reasons |= {"fusion_ddp": few, "modnn_fig17": few}
    left_out = [line for line in lines if "left out" in line]
    assert left_out == [f"{name} is left out: ValueError: {why}" for name, why in reasons.items()]
    assert lines[-1].endswith("not quiet, so that times will vary: load 3, [make] (8) takes 97 % of a core")
    assert len(results(tmp_path / "outputs")) == 1, "nothing is measured"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("experiment=all", "hardware=emulated"), "takes hardware=cpu or hardware=cuda"),
        (("experiment=ooo_fig4", "rerun=True", "minutes=9"), "rerun=true begins with the first point in every call"),
        (("experiment=all", "results_dir=results"), "none is left to run"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    run: Command, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(command, "of_papers", lambda *hardware: ["ooo_fig4"])
    monkeypatch.setattr(command, "disturbances", lambda: [])
    with pytest.raises(SystemExit, match=message):
        run(*options)


def test_sweep_over_an_axis_adds_points_to_one_figure(
    run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("experiment=fusion_fig4", "-m", *TINY, "~data.image_size", f"models={{mobilenet_v2: {MLP}}}", "batch_size=1,2")
    (result,) = results(tmp_path / "outputs").values()
    assert [point.at["batch_size"] for point in result.points] == [1, 2]
    assert "fitted with t_grad" in capsys.readouterr().out


def test_sweep_over_a_setting_makes_a_folder_each(run: Command, tmp_path: Path) -> None:
    run("-m", "experiment=fusion_fig3", *TINY, "~data.image_size", f"model={MLP}", "batch_size=2,3")
    found = results(tmp_path / "outputs")
    assert [result.points[0].settings["batch_size"] for result in found.values()] == [2, 3]
    for folder, result in found.items():
        assert f"batch_size={result.points[0].settings['batch_size']}" in folder
        assert set(result.points[0].variants("step")) >= {"baseline", "fused", "retime_backward", "no_update"}
        assert (tmp_path / "outputs" / folder / "result.png").exists()


def test_what_an_interrupt_leaves_is_counted(
    run: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "of_papers", lambda *hardware: ["ooo_fig4", "ooo_fig5", "ooo_fig6"])
    monkeypatch.setattr(command, "run", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run("experiment=all")
    assert capsys.readouterr().out.endswith("1 points of 1 experiments are left, and 2 experiments have not begun\n")


def test_only_recording_and_reports_write_recorded_results(
    run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, experiment = Path("ooo-backprop/figure-4/simulated"), ["experiment=ooo_fig4"]
    run(*experiment, "seed=1")  # whose folder is below the next one's
    capsys.readouterr()
    run(*experiment)
    shown = capsys.readouterr().out
    assert shown.count("Table and picture:") == 1
    assert shown.endswith(f"Table and picture: outputs/{place}/result.md, result.png\n")
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]

    run(*experiment, "record=true", "allow_dirty=true")
    assert f"Table and picture: results/{place}/result.md, result.png\n" in capsys.readouterr().out
    listed = (tmp_path / "results" / "README.md").read_bytes()
    assert f"({place}/result.md)".encode() in listed  # the page is that of the results

    for folder, options in (("results", ()), ("outputs", ("results_dir=outputs",))):
        pages = [tmp_path / folder / "README.md", tmp_path / folder / place / "result.md"]
        for page in pages:
            page.unlink(missing_ok=True)
        run("experiment=report", *options)
        assert all(page.exists() for page in pages)
    assert (tmp_path / "results" / "README.md").read_bytes() == listed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("results_dir=results",), "results_dir=results is where recorded results are: record=true adds to them"),
        (("results_dir=results/more",), "results_dir=results/more is where recorded results are"),
        (("record=true", "results_dir=elsewhere"), "leave out results_dir=elsewhere, or record"),
    ],
)
def test_recording_is_said_in_one_way(
    run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit):
        run("experiment=ooo_fig4", *options)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_targets_compare_trainer_runs(run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = "cases.mlp_batch4"
    run(
        *("experiment=fusion_targets", "hardware.cores=null", "rounds=1", "steps=1"),
        *("~cases.mlp_batch64", "~cases.large_convolution"),
        *(f"{case}.model.depth=2", f"{case}.model.width=8", f"{case}.data.features=8", f"{case}.data.classes=8"),
    )
    points = {point.at["case"]: point for point in next(iter(results(tmp_path / "outputs").values())).points}
    assert set(points["mlp_batch4"].variants("step")) == {"baseline", "fused", "retime_backward", "retime_forward"}
    same = points["mlp_batch4"].facts["final weights bit-identical to fused"]
    assert same.endswith("fused, retime_backward, retime_forward")
    assert "mlp_batch4: retime backward over the plain strategy" in capsys.readouterr().out


@pytest.mark.long
def test_ddp_runs_in_a_fresh_process_with_all_its_ranks(run: Command, tmp_path: Path) -> None:
    run("experiment=fusion_ddp", *TINY, "~data.image_size", f"model={MLP}", "batch_size=2", "devices=2")
    (result,) = results(tmp_path / "outputs").values()
    assert [point.at["devices"] for point in result.points] == [1, 2]
    for point in result.points:
        assert "retime_backward" in point.facts["final weights bit-identical to fused"]


@pytest.mark.long
def test_memory_is_measured_in_a_fresh_process(run: Command, tmp_path: Path) -> None:
    run("experiment=fusion_memory", *TINY, "sizes=[2]", "model.width=8", "variants=[fused]", "batch_size=2")
    (result,) = results(tmp_path / "outputs").values()
    (point,) = result.points
    assert point.facts["parameters"] == 2 * (8 * 8 + 8)
    assert point.values("fused", "gradients alive") == [2 * 4 * (8 * 8 + 8) / 2**20]
