"""Figures 1, 2, 7, 8 and 9, simulated: rows are those of the counted networks, and verdicts follow from the numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.utils import get_class

from retime.recipes.core.claims import Claim, judged
from retime.recipes.core.results import Result
from retime.recipes.ooo import claims, counted_networks, two_streams
from retime.recipes.ooo.counted_networks import JOINT, ONE, PAPERS, READY, counted_network, simulated_plans
from retime.recipes.ooo.model_costs import TITAN_XP, V100
from retime.recipes.ooo.two_streams import (
    EXECUTION,
    HIGHEST_RATIO,
    MAIN_WAITS,
    MOST_MORE,
    PEAK,
    STEP,
    WAIT,
    CountedRecipe,
)
from support import recipes

WIDE, MIDDLE, NARROW = (f"DenseNet-121 (k={growth})" for growth in (32, 24, 12))
SMALL = ("image_size=64", "batch_sizes=[2]")
BLOCKS = [f"DenseBlock-{number}" for number in range(1, 5)]
Ran = tuple[CountedRecipe, Result]


@pytest.fixture
def ran(tmp_path: Path) -> Callable[..., Ran]:
    """Run an experiment and draw it."""

    def run(experiment: str, *overrides: str) -> Ran:
        settings = recipes.settings_for(f"experiment={experiment}", *overrides)
        recipe = get_class(settings.recipe)()
        result = recipes.ran(recipe, settings, tmp_path, 10_000)
        assert result.simulated
        return recipe, result

    return run


def remarks(recipe: CountedRecipe, result: Result) -> dict[str, list[tuple[float, str]]]:
    """By what a claim is about: the simulated values and what is said of them."""
    found: dict[str, list[tuple[float, str]]] = {}
    for line in recipe.compare(result):
        assert line.note.startswith("simulated, ")
        found.setdefault(line.against.what, []).append((line.measured.median, line.note.rpartition("; ")[2]))
    return found


@pytest.mark.parametrize(
    ("unit", "published", "value", "holds"),
    [("x", 1.10, 1.12, True), ("x", 1.06, 1.08, False), ("%", 4, 5, True), ("%", 4, 5.1, False), ("%", 4, 2.9, False)],
)
def test_a_number_holds_within_a_quarter_and_a_speedup_by_its_gain(unit, published, value, holds) -> None:
    line = judged(Claim("paper", "where", unit, published), value, "k=12", "too long")
    assert line.note == f"simulated, k=12; {'holds' if holds else 'does not hold: too long'}"


def test_figure_1_at_full_size(ran) -> None:
    recipe, result = ran("ooo_fig1")
    highest = [[round(p.values(block, HIGHEST_RATIO)[0], 2) for block in BLOCKS] for p in result.points]
    assert highest == [[1.78, 4.33, 11.51, 6.30], [0.92, 1.80, 3.15, 3.15], [0.56, 1.05, 1.58, 2.36]]
    said = remarks(recipe, result)
    assert [round(value, 1) for value, _ in said[claims.claim("figure-1-share").what]] == [40.8, 36.7, 35.2]
    assert [verdict.partition(":")[0] for _, verdict in said[claims.claim("figure-1-ratio").what]] == [
        "does not hold",
        "holds",
        "does not hold",
    ]
    notes = recipe.notes(result)
    assert "Issuing a kernel is assumed to take 60 us. Convolutions alone; activations run in place." in notes
    assert f"- {NARROW}, batch 32: {HIGHEST_RATIO}, never falls from block to block: does not hold." in notes
    assert f"- {WIDE}, batch 32: {HIGHEST_RATIO}, never falls from block to block: holds." in notes


@pytest.mark.long
def test_figure_2_at_full_size(ran) -> None:
    recipe, result = ran("ooo_fig2", f"networks=['{MIDDLE}']")
    for point in result.points:
        network = counted_network(point.at["network"], 32)
        for quantity, values in (
            (WAIT, counted_networks.issue_waits_ms(network)),
            (EXECUTION, counted_networks.forward_ms(network)),
        ):
            assert [point.values(b, quantity)[0] for b in BLOCKS] == pytest.approx(values, abs=1e-4)
        times = point.facts["kernels: start and end (ms)"]
        assert len(times) == 2 * sum(point.facts["kernels by block"])
        assert times == sorted(times)
        waited = times[-1] - sum(point.values(block, EXECUTION)[0] for block in BLOCKS)
        assert waited == pytest.approx(sum(point.values(block, WAIT)[0] for block in BLOCKS), abs=1e-3)
    masked = "issue masked in DenseBlock-3, no more by the end of DenseBlock-4"
    already = "does not hold, the device already waits in DenseBlock-3"
    assert f"- {MIDDLE}, batch 32: {masked}: {already}." in "\n".join(recipe.notes(result))
    said = remarks(recipe, result)
    assert [round(us) for us, _ in said[claims.claim("figure-2-shortest").what]] == [19]
    assert [round(us) for us, _ in said[claims.claim("figure-2-longest").what]] == [266]


def test_figure_2_without_issue(ran) -> None:
    recipe, result = ran("ooo_fig2", f"networks=['{WIDE}']", "issue_ms=0.0", *SMALL)
    assert [result.points[0].values(block, WAIT) for block in BLOCKS] == [[0.0]] * 4
    ahead = "does not hold, execution takes so long that issuing stays ahead to the end"
    assert f"by the end of DenseBlock-4: {ahead}." in recipe.notes(result)[-1]


def test_figure_8(ran) -> None:
    recipe, result = ran("ooo_fig8", *SMALL)
    (point,) = result.points
    network = counted_network(WIDE, 2, image_size=64)
    plans = simulated_plans(network, (JOINT, PAPERS))
    for name in (ONE, JOINT, PAPERS):
        assert point.values(name, STEP)[0] == pytest.approx(plans[name].makespan_ms, abs=1e-4)
    for name in (JOINT, PAPERS):
        gains = [point.values(name, f"{region.name} speedup")[0] for region in plans[name].regions]
        assert gains == pytest.approx([region.speedup for region in plans[name].regions], abs=1e-4)
        boxes, idle_ms = point.facts["boxes"][name], point.values(name, MAIN_WAITS)[0]
        drawn_ms = sum(end - start for _, lane, start, end in boxes if lane == "main")
        assert drawn_ms + idle_ms == pytest.approx(plans[name].makespan_ms, rel=0.02), "gaps that are not drawn"
        assert next(block for block, lane, *_ in boxes if lane == "main") == 3, "the step begins with the last block"
    said = remarks(recipe, result)
    assert [len(said[claim.what]) for claim in (claims.claim("figure-8-r2"), claims.claim("figure-8-r5"))] == [3, 3]
    notes = "\n".join(recipe.notes(result))
    assert f"{PAPERS}: DenseBlock-4's weight gradients run beside R5" in notes
    assert "in the paper beside R5: " in notes


def test_figure_9(ran) -> None:
    recipe, result = ran("ooo_fig9", *SMALL)
    (point,) = result.points
    network = counted_network(WIDE, 2, image_size=64)
    plans = simulated_plans(network, (JOINT, PAPERS))
    curves = {name: counted_networks.memory_by_layer(run.timeline) for name, run in plans.items()}
    assert point.facts["layers"] == [*range(121, 1, -1)]
    for name in (PAPERS, JOINT):
        more = [curves[name][layer] - curves[ONE][layer] for layer in curves[ONE]]
        assert point.values(name, MOST_MORE)[0] == pytest.approx(max(more) / 1e6, abs=0.01)
        at_end = curves[name][89] - curves[ONE][89]
        assert point.values(name, two_streams.BLOCK_4_MORE)[0] == pytest.approx(at_end / 1e6, abs=0.01)
        assert point.values(name, PEAK)[0] == pytest.approx(plans[name].timeline.peak_bytes / 1e9, abs=1e-5)
    assert len(remarks(recipe, result)[claims.claim("figure-9-more").what]) == 4
    assert sum("the peak comes early in the step" in note for note in recipe.notes(result)) == 3


@pytest.mark.long
def test_figure_7_on_both_gpus(ran) -> None:
    mobile = "MobileNet V3 (alpha=0.25)"
    names = f"networks=['{NARROW}','{mobile}','ResNet-50']"
    recipe, result = ran("ooo_fig7_simulated", names, "image_size=32", "batch_sizes=[32]")
    gains = []
    for gpu, blocks in ((V100, 1520), (TITAN_XP, 570)):
        network = counted_network(mobile, 32, image_size=32, gpu=gpu)
        assert network.device().capacity == blocks
        plans = simulated_plans(network, (READY, JOINT))
        gains.append(plans[ONE].makespan_ms / plans[JOINT].makespan_ms)
    said = remarks(recipe, result)
    assert said[claims.claim("streams-mobilenet").what][0][0] == pytest.approx(gains[0], rel=1e-3)
    shares = [share for share, _ in said[claims.claim("titan-xp").what]]
    assert len(shares) == 3
    assert (gains[1] - 1) / (gains[0] - 1) == pytest.approx(shares[1], rel=1e-2)
    assert claims.claim(two_streams.MULTI_STREAM["ResNet-50", 64]).what not in said, "batch 64 did not run"
    notes = "\n".join(recipe.notes(result))
    assert "upper bounds of this model" in notes
    assert "and that less than MobileNet, at most: " in notes
    error = f"{100 * (min(shares) - 1):+.0f} to {100 * (max(shares) - 1):+.0f} %"
    assert f"30 of a V100's 80 multiprocessors, hence 570 thread blocks. Its gain is {min(shares):.2f} to" in notes
    assert f"the paper says similar: an error of {error}" in notes
    with pytest.raises(ValueError, match=r"gpus=\['P100'\]: there are V100, Titan XP"):
        ran("ooo_fig7_simulated", "gpus=[P100]")


@pytest.mark.long
def test_other_networks_have_no_verdicts_of_densenets(ran) -> None:
    recipe, result = ran("ooo_fig8", "networks=['MobileNet V3 (alpha=0.25)']", *SMALL)
    assert recipe.compare(result) == []
    assert len(recipe.notes(result)) == 3
    assert result.points[0].facts["blocks"] == [f"block-{number}" for number in range(1, 6)]
