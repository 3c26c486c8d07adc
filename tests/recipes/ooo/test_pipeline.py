"""Pipelines on two ranks in small, with layers that sleep or compute, and what reports say of a result."""

from dataclasses import replace
from pathlib import Path

import pytest

from retime.recipes.core.claims import Claim, Target, paper
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.ooo.claims import claim, target
from retime.recipes.ooo.pipeline import (
    PEAK,
    STEP,
    PipelineLinks,
    PipelineMemory,
    PipelineTargets,
    RealLayers,
    simulated_ms,
)
from retime.recipes.ooo.settings import PipelineSettings, of_case
from support.recipes import ran, settings_for

ONE_CASE = ["~cases.eight_ranks", "~cases.eight_ranks_far"]
SMALL = [*ONE_CASE, "rounds=1", "warmup_rounds=0", "steps=1", "ranks=2", "layers=4", "micro_batches=2", "unit_ms=2"]


def settings_with(*overrides: str, experiment: str = "ooo_pipeline_targets") -> PipelineSettings:
    return settings_for(f"experiment={experiment}", *overrides)


@pytest.mark.long
def test_every_schedule_runs_with_weight_gradients_that_wait(tmp_path: Path) -> None:
    schedules = "ooo2,ooo2@2,ooo2_flush,ooo1,gpipe,1f1b,zbv,interleaved,interleaved_zero_bubble"
    settings, recipe = settings_with(*SMALL, f"schedules=[{schedules}]"), PipelineTargets()
    result = ran(recipe, settings, tmp_path)
    (point,) = result.points
    assert point.variants(STEP) == list(settings.schedules)
    assert point.facts["stages"] == {
        **{"ooo2": 4, "ooo2@2": 4, "ooo2_flush": 4, "ooo1": 2, "gpipe": 2},
        **{"1f1b": 2, "zbv": 4, "interleaved": 4, "interleaved_zero_bubble": 4},
    }
    assert point.facts["layers alive"]["ooo2@2"] == 2
    assert point.facts["layers alive"]["gpipe"] == 4
    for schedule in ("ooo2", "ooo2_flush", "ooo1", "zbv", "interleaved_zero_bubble"):
        for kind in "FOW":  # W sleeps apart from O; tasks may be late, but never too short
            assert point.facts["task ms"][schedule][kind] >= settings.unit_ms


def test_the_simulation_is_that_of_the_paper() -> None:
    """16 layers, 4 micro-batches, 4 ranks: GPipe takes 84 units, and 1.62 times as long as ours at most."""
    case = of_case(settings_with("unit_ms=1"), "four_ranks")
    assert simulated_ms(case, "gpipe", 0.0) == 84
    assert 84 / simulated_ms(case, "ooo2", 0.0) == pytest.approx(1.62, abs=0.05)
    with pytest.raises(ValueError, match="'Interleaved1F1B' is torch's own"):
        simulated_ms(case, "Interleaved1F1B", 0.0)


@pytest.mark.long
def test_the_targets_at_zbvs_memory_can_be_met_on_paper() -> None:
    case = of_case(settings_with(), "eight_ranks_far")
    zbv, ours, more = (simulated_ms(case, name, case.unit_ms / 2) for name in ("zbv", "ooo@32", "ooo@51"))
    assert zbv / ours >= 1
    assert zbv / more >= 1.08


def test_a_case_says_what_it_cannot_have() -> None:
    with pytest.raises(ValueError, match=r"cases\.four_ranks\.stages is no setting of a case; there are rounds, "):
        of_case(settings_with("+cases.four_ranks.stages=4"), "four_ranks")
    with pytest.raises(ValueError, match="'ooo2@many' has no number of layers"):
        simulated_ms(of_case(settings_with(), "four_ranks"), "ooo2@many", 0.0)


def test_steps_are_compared_with_peers_and_with_their_simulation() -> None:
    took = {"ooo2": [100.0], "ooo1": [100.0], "gpipe": [160.0], "zbv": [120.0], "interleaved_zero_bubble": [90.0]}
    simulated = {"ooo2": 100.0, "ooo1": 100.0, "gpipe": 150.0, "zbv": 120.0, "interleaved_zero_bubble": 100.0}
    facts = {"ranks": 4, "simulated ms": simulated, "layers alive": dict.fromkeys(took, 16) | {"ooo2": 12}}
    rows = [Row(schedule, STEP, "ms", values) for schedule, values in took.items()]
    result = Result("t", "recipe", "ooo-backprop", "where", "title", [Point({"case": "four_ranks"}, {}, rows, facts)])
    lines = PipelineTargets().compare(result)
    over = [Target(what, "x", least) for ranks, _, _, least, what in paper("ooo").targets["pipelines"] if ranks == 4]
    assert [line.against for line in lines] == [claim("pipeline"), *over, target("kept"), target("simulated")]
    assert [line.measured.median for line in lines if line.measured] == pytest.approx([1.6, 1.6, 1.2, 0.9, 0.75, 10.0])
    assert lines[-1].note.endswith("interleaved_zero_bubble")  # shorter counts as well


def test_figure_11_takes_as_many_layers_a_stage_as_are_the_shortest_on_paper() -> None:
    settings = settings_with(experiment="ooo_fig11_links")
    ethernet = of_case(settings, "BERT-24 Ethernet")
    assert (ethernet.layers, ethernet.ranks, ethernet.message_kib) == (24, 4, 765)
    fine = replace(ethernet, layers_per_stage=1)
    hop_ms = 1.8 * ethernet.unit_ms
    gpipe, groups, each = (
        simulated_ms(case, name, hop_ms)
        for case, name in ((ethernet, "gpipe"), (ethernet, "ooo2_flush"), (fine, "ooo2_flush"))
    )
    assert gpipe / groups > 1.2
    assert each / groups > 1.3


def test_figure_11_is_compared_with_the_papers() -> None:
    took = {"gpipe": [200.0], "ooo2_flush": [160.0], "ooo2": [100.0]}
    facts = {"simulated ms": {"gpipe": 190.0, "ooo2_flush": 160.0, "ooo2": 100.0}}
    rows = [Row(schedule, STEP, "ms", values) for schedule, values in took.items()]
    points = [Point({"case": "BERT-24 Ethernet"}, {}, rows, facts)]
    published, error = PipelineLinks().compare(Result("t", "recipe", "ooo-backprop", "where", "title", points))
    assert isinstance(published.against, Claim)
    assert published.against.value == 1.48
    assert published.measured.median == 1.25
    assert published.note.endswith("simulated 1.19; ooo2 2.00")
    assert error.against == target("simulated")
    assert error.note.endswith("gpipe")


SIZES = {"GPT-2": ("n_layer", "n_embd"), "BERT": ("num_hidden_layers", "hidden_size")}


def small(network: str) -> list[str]:
    layers, width = (f"cases.{network}.model.model.config.{name}" for name in SIZES[network])
    (other,) = set(SIZES) - {network}
    return [f"~cases.{other}", f"{layers}=4", f"{width}=48", "rounds=1", "warmup_rounds=0", "steps=1", "batch_size=4"]


@pytest.mark.parametrize("network", [pytest.param("BERT", marks=pytest.mark.long), "GPT-2"])
def test_all_of_them_train_the_same_step(network: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    few = ["schedules=[ooo2,gpipe]", "peers=[GPipe,InterleavedZeroBubble 2,ZBVZeroBubble]"]
    settings, recipe = settings_with(*small(network), *few, experiment="ooo_pipeline_compute"), RealLayers()
    result = ran(recipe, settings, tmp_path)
    (point,) = result.points
    assert point.variants(STEP) == [
        *("ooo2", "gpipe", "torch GPipe", "torch InterleavedZeroBubble 2", "torch ZBVZeroBubble", "one device")
    ]
    assert set(point.facts["apart"]) == set(point.variants(STEP)) - {"one device"}
    assert max(point.facts["apart"].values()) < 1e-4


def test_the_peer_is_the_fastest_of_torchs_own() -> None:
    took = {"ooo2": [100.0], "gpipe": [50.0], "torch GPipe": [130.0], "torch 1F1B": [90.0], "one device": [190.0]}
    facts = {"ranks": 2, "apart": {"ooo2": 1e-6, "torch 1F1B": 1e-3}}
    rows = [Row(name, STEP, "ms", values) for name, values in took.items()]
    point = Point({"network": "GPT-2"}, {}, rows, facts)
    result = Result("t", "recipe", "ooo-backprop", "where", "title", [point])
    lines = RealLayers().compare(result)
    assert [line.against for line in lines] == [target(name) for name in ("over-best", "over-gpipe", "apart")]
    assert [line.measured.median for line in lines if line.measured] == pytest.approx([0.9, 1.3, 1e-3])
    assert lines[0].note.endswith("torch 1F1B")


@pytest.mark.long
def test_fast_forwarding_holds_output_gradients_longer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    layers = "cases.BERT-24.model.model.config.num_hidden_layers=4"
    small = ["rounds=1", "ranks=2", "schedules=[gpipe,ooo1_flush,1f1b]", layers]
    settings, recipe = settings_with(*small, experiment="ooo_pipeline_memory"), PipelineMemory()
    result = ran(recipe, settings, tmp_path)
    (point,) = result.points
    by_rank = point.facts["MiB by rank"]
    assert by_rank["1f1b"][1] < 0.8 * by_rank["gpipe"][1]  # has fewer micro-batches' activations at once there
    assert by_rank["gpipe"][1] < by_rank["ooo1_flush"][1] < 1.11 * by_rank["gpipe"][1]
    assert point.values("gpipe", PEAK) == [max(by_rank["gpipe"])]
    (line,) = recipe.compare(result)
    assert line.against == claim("forwarding-memory")
