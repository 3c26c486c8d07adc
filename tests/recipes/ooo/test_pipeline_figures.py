"""Figures 5, 6, 11, 12 and 13, and section 6, on paper: numbers are those of the schedules, beside the paper's."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.results import Result
from retime.recipes.ooo.pipeline_scaling import (
    BOTH,
    FIRST_K,
    GPIPE,
    MEGATRON,
    MEGATRON_FORWARDED,
    MODEL_PARALLEL,
    ONE,
    OURS,
    PAPERS1,
    PAPERS2,
    PIPEDREAM,
    SPEED,
    STEP,
    Case,
    Hybrid,
    Hybrids,
    PipelineScaling,
)
from retime.recipes.ooo.pipeline_scaling import FORWARDED as OOO_PIPE2
from retime.recipes.ooo.pipeline_scaling import PLAIN as PLAIN_GPIPE
from retime.recipes.ooo.recurrent_pipeline import GPIPE_STATE_FIRST, STATE_FIRST, Cells, RecurrentPipeline
from retime.recipes.ooo.timelines import AT_ONCE, DEALT, FORWARDED, PLAIN, PipelineTimelines
from support.recipes import ran, settings_for


def settings_with(experiment: str, *overrides: str) -> Any:
    return settings_for(f"experiment={experiment}", *overrides)


def timelines(experiment: str, folder: Path, *overrides: str) -> Result:
    recipe = PipelineTimelines()
    result = ran(recipe, settings_with(experiment, *overrides), folder)
    assert (folder / "trace.json").stat().st_size > 1000
    assert result.simulated
    return result


def test_figure_5(tmp_path: Path) -> None:
    result = timelines("ooo_fig5", tmp_path)
    (point,) = result.points
    assert [point.values(name, STEP)[0] for name in (PLAIN, FORWARDED, DEALT)] == [23, 19, 16]
    assert "The figure's numbers hold." in PipelineTimelines().notes(result)
    assert PipelineTimelines().compare(timelines("ooo_fig5", tmp_path / "other sizes", "layer_counts=[12]")) == []


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


def test_cases_of_the_scaling_figures(tmp_path: Path) -> None:
    few = ["schedules=[gpipe,zbv,ooo2_flush,ooo2,ooo2_flush at each layer]"]
    recipe = PipelineScaling()
    settings = settings_with("ooo_fig11", *few, "~cases.FFNN")
    result = ran(recipe, settings, tmp_path)
    assert result.simulated
    near, _, far = result.points
    for point in result.points:
        assert point.values(ONE, STEP) == [3 * 24 * 4]
        assert point.values(OURS, STEP)[0] < point.values(GPIPE, STEP)[0]
    assert near.values(OURS, STEP)[0] < far.values(OURS, STEP)[0]
    assert far.values("ooo2_flush", STEP)[0] < far.values("ooo2_flush at each layer", STEP)[0]  # section 8.4.1
    claimed = recipe.compare(result)
    assert len(claimed) == 5


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


def test_peers_of_the_paper(tmp_path: Path) -> None:
    """PipeDream, fast-forwarding on Megatron 2, and what is formed of several cases."""
    cases = {"BERT-24, 8": (8, 2), "BERT-24, 32": (8, 4), "BERT-48, 8": (16, 4), "BERT-12, 8": (4, 2)}  # smaller ones
    settings = settings_with(
        "ooo_fig13", "schedules=[gpipe,pipedream,interleaved,interleaved_fast_forwarded,ooo2_flush]"
    )
    settings.cases = {
        name: {"layers": layers, "ranks": ranks, "micro_batches": ranks, "ratio": 0.05}
        for name, (layers, ranks) in cases.items()
    }
    recipe = PipelineScaling()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    few, many, large, small = result.points
    assert few.values(PIPEDREAM, STEP)[0] == pytest.approx(3 * 4 * 2, rel=0.01)  # four layers a GPU, idle for messages
    assert few.facts["PipeDream's versions of the weights, by GPU"] == [2, 1]
    assert large.values(MEGATRON_FORWARDED, STEP)[0] < large.values(MEGATRON, STEP)[0]
    lines = {line.note: line for line in recipe.compare(result)}
    gain = many.values(PAPERS2, SPEED)[0] / few.values(PAPERS2, SPEED)[0]
    assert lines["BERT-24: 32 GPUs over 8"].measured == spread([gain])
    assert "BERT-48: 32 GPUs over 8" not in lines  # one of the two was not simulated
    ratio = small.values(PIPEDREAM, STEP)[0] / small.values(PAPERS2, STEP)[0]
    assert lines["weak scaling"].measured == spread([ratio])
    forwarded = 100 * (large.values(MEGATRON, STEP)[0] / large.values(MEGATRON_FORWARDED, STEP)[0] - 1)
    (line,) = [line for line in lines.values() if "% at most" in line.note]
    assert line.measured == spread([forwarded])


@pytest.mark.long
def test_the_gain_falls_with_the_number_of_micro_batches(tmp_path: Path) -> None:
    settings = settings_with("ooo_fig13_micro_batches", "schedules=[gpipe,ooo2_flush]", "micro_batch_counts=[1,4,16]")
    settings.cases = {"BERT-12, 8": settings.cases["BERT-12, 8"]}
    recipe = PipelineScaling()
    result = ran(recipe, settings, tmp_path)
    assert [point.at["micro_batches"] for point in result.points] == [1, 4, 16]
    gains = [point.values(GPIPE, STEP)[0] / point.values(PAPERS2, STEP)[0] for point in result.points]
    assert gains == sorted(gains, reverse=True)
    assert recipe.compare(result) == []


def test_a_simulated_picture_names_schedules_and_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(charts, "save", lambda drawing, path: drawn.append(drawing))
    settings = settings_with("ooo_fig11", "schedules=[gpipe,zb_h1,ooo2_flush]", "~cases.FFNN")
    recipe = PipelineScaling()
    recipe.draw(recipe.run(settings, tmp_path, Console(quiet=True)), tmp_path / "picture.png")
    (drawing,) = drawn
    assert drawing.get_suptitle() == "Pipelines on four GPUs by network, simulated, hollow: the paper"
    assert [text.get_text() for text in drawing.legends[0].get_texts()] == [
        "cross-layer model parallelism",
        "GPipe",
        "ZB-H1",
        "OOO-Pipe2",
    ]


def test_a_recurrent_network_by_hand() -> None:
    """Two cells on two GPUs: I1, F1, F2 with I2 beside, then O2 and W2 as one, and W1 when both are done."""
    cells = Cells(cells=2, ranks=2, micro_batches=2, independent=1.0, ratio=0.0)
    assert cells.units(ONE) == 2 + 2 + 3 + 2
    # first GPU: I1 F1 .. .. .. W1 V1; second: I2 .. F2 B2 B2 V2
    assert cells.units(MODEL_PARALLEL) == 7
    assert cells.units(STATE_FIRST) == 7
    # halves: first GPU I1 F1 I1 F1 .. .. .. B1 V1 B1 V1; second: I2 I2 F2 .. F2 B2 B2 B2 B2 V2 V2
    assert cells.units(GPIPE_STATE_FIRST) == 5.5
    # O2 first, so that W1 begins a unit sooner
    assert cells.units(PAPERS1) == cells.units(PAPERS2) == 6
    far = Cells(cells=2, ranks=2, micro_batches=2, independent=1.0, ratio=0.5)
    assert far.units(PAPERS1) == 7
    with pytest.raises(ValueError, match="'zbv' is unknown here"):
        cells.units("zbv")


def test_micro_batches_of_a_recurrent_network_cost_what_is_fixed(tmp_path: Path) -> None:
    recipe = RecurrentPipeline()
    result = ran(recipe, settings_with("ooo_fig11_rnn"), tmp_path)
    plain, *_, fixed = result.points
    assert plain.values(GPIPE, STEP)[0] < plain.values(MODEL_PARALLEL, STEP)[0] < fixed.values(GPIPE, STEP)[0]
    state_first, fixed_too = (point.values(GPIPE_STATE_FIRST, STEP)[0] for point in (plain, fixed))
    assert state_first < plain.values(PAPERS2, STEP)[0] < fixed_too
    assert plain.values(PAPERS2, STEP)[0] < plain.values(STATE_FIRST, STEP)[0] < plain.values(MODEL_PARALLEL, STEP)[0]
    assert plain.values(PAPERS2, STEP) == fixed.values(PAPERS2, STEP)  # the batch is whole
    assert [line.note.split(":")[0] for line in recipe.compare(result)] == ["RNN", "RNN"]


def test_reverse_first_k_inside_a_pipeline(tmp_path: Path) -> None:
    small = "{layers: 8, ranks: 2, micro_batches: 2, ratio: 0.0, synchronisation: 3.0}"
    recipe, settings = Hybrids(), settings_with("ooo_hybrid", "~cases", f"+cases={{small: {small}}}")
    result = ran(recipe, settings, tmp_path)
    (point,) = result.points
    assert len(point.facts["GPipe: units by k"]) == 9
    assert point.values(BOTH, STEP)[0] < point.values(OOO_PIPE2, STEP)[0] < point.values(PLAIN_GPIPE, STEP)[0]
    assert point.values(BOTH, STEP)[0] < point.values(FIRST_K, STEP)[0]


def test_without_synchronisation_a_steady_step_is_its_makespan() -> None:
    case = Hybrid(layers=8, ranks=2, micro_batches=2, ratio=0.0, synchronisation=0.0)
    assert case.units(*case.plans[PLAIN_GPIPE], 0) <= 35  # Figure 6 (a); the next step may begin before it ends
    assert case.units(*case.plans[OOO_PIPE2], 0) <= 25  # (c)
