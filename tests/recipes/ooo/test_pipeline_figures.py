"""Figures 5, 6, 11, 12 and 13 on paper: the recipes' numbers are those of the schedules, beside the paper's."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from retime.recipes.core.results import Result
from retime.recipes.core.schema import PaperPipelineSettings, register_all, settings_of
from retime.recipes.ooo.pipeline_scaling import GPIPE, ONE, OURS, STEP, Case, PipelineScaling
from retime.recipes.ooo.pipeline_timelines import AT_ONCE, DEALT, FORWARDED, PLAIN, PipelineTimelines


def settings_with(experiment: str, *overrides: str) -> PaperPipelineSettings:
    register_all()
    with initialize_config_module("retime.conf", version_base=None):
        settings = settings_of(compose("config", [f"experiment={experiment}", *overrides]))
    assert isinstance(settings, PaperPipelineSettings)
    return settings


def timelines(experiment: str, folder: Path, *overrides: str) -> Result:
    recipe = PipelineTimelines()
    result = recipe.run(settings_with(experiment, *overrides), folder, Console(quiet=True))
    recipe.draw(result, folder / "picture.png")
    assert (folder / "picture.png").stat().st_size > 1000
    assert (folder / "trace.json").stat().st_size > 1000
    assert result.simulated
    return result


def test_figure_5(tmp_path: Path) -> None:
    result = timelines("ooo_fig5", tmp_path)
    (point,) = result.points
    assert [point.values(name, STEP)[0] for name in (PLAIN, FORWARDED, DEALT)] == [23, 19, 16]
    assert "The figure's numbers hold." in PipelineTimelines().notes(result)


def test_figure_6_has_others_beside(tmp_path: Path) -> None:
    (point,) = timelines("ooo_fig6", tmp_path).points
    assert [point.values(name, STEP)[0] for name in (PLAIN, FORWARDED, DEALT)] == [35, 30, 25]
    assert point.has("ZBV", STEP)
    assert point.has("interleaved zero bubble", STEP)


def test_figure_12(tmp_path: Path) -> None:
    result = timelines("ooo_fig12", tmp_path)
    eight, sixteen = result.points
    assert [eight.values(name, STEP)[0] for name in (PLAIN, FORWARDED, DEALT)] == [41, 34, 29]
    assert [sixteen.values(name, STEP)[0] for name in (PLAIN, FORWARDED, DEALT, AT_ONCE)] == [83, 68, 53, 51]
    notes = PipelineTimelines().notes(result)
    assert "The figure's numbers hold." in notes
    assert any("with all forward passes first, it is 1.57" in note for note in notes)


def test_other_sizes_do_not_have_the_figures_numbers(tmp_path: Path) -> None:
    result = timelines("ooo_fig5", tmp_path, "layer_counts=[12]")
    assert PipelineTimelines().compare(result) == []


def test_cases_of_the_scaling_figures(tmp_path: Path) -> None:
    few = ["schedules=[gpipe,zbv,ooo2_flush,ooo2,ooo2_flush at each layer]"]
    recipe = PipelineScaling()
    settings = settings_with("ooo_fig11", *few, "~cases.FFNN")
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    assert result.simulated
    near, _, far = result.points
    for point in result.points:
        assert point.values(ONE, STEP) == [3 * 24 * 4]
        assert point.values(OURS, STEP)[0] < point.values(GPIPE, STEP)[0]
    assert near.values(OURS, STEP)[0] < far.values(OURS, STEP)[0]
    assert far.values("ooo2_flush", STEP)[0] < far.values("ooo2_flush at each layer", STEP)[0]  # section 8.4.1
    claimed = recipe.compare(result)
    assert len(claimed) == 5
    recipe.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_messages_between_nodes_take_longer() -> None:
    one_node = Case(layers=8, ranks=4, micro_batches=4, ratio=0.1, between=2.0, per_node=4)
    two_nodes = Case(layers=8, ranks=4, micro_batches=4, ratio=0.1, between=2.0, per_node=2)
    assert one_node.hops[1][2] == 0.1
    assert two_nodes.hops[1][2] == 2.0
    assert one_node.units("gpipe") < two_nodes.units("gpipe")


def test_a_case_says_what_it_lacks() -> None:
    settings = settings_with("ooo_fig11", "+cases.FFNN.nodes=2")
    with pytest.raises(ValueError, match=r"cases\.FFNN: .*a case has layers, ranks, micro_batches"):
        PipelineScaling().run(settings, Path("unused"), Console(quiet=True))
