"""Figures 1 and 2 of optimizer fusion: depths as in the paper, and bytes counted by hand."""

from pathlib import Path
from typing import Any

from retime.recipes.core.recipe import Recipe
from retime.recipes.core.results import Result
from retime.recipes.fusion.orders import (
    BACKWARD,
    BASELINE,
    DEPTH,
    FORWARD,
    MERGED,
    OF_PAPER,
    READ,
    WRITTEN,
    Depths,
    Transactions,
    traffic,
)
from retime.schedules import backward_fusion, baseline, forward_fusion
from support.recipes import ran, settings_for

MLP = "{_target_: retime.recipes.models.mlp, depth: 4, width: 10}"


def run(recipe: Recipe[Any], folder: Path, *overrides: str) -> Result:
    return ran(recipe, settings_for(*overrides), folder)


def test_depths_are_the_papers(tmp_path: Path) -> None:
    result = run(Depths(), tmp_path, "experiment=fusion_fig1", "sizes=[1,4]")
    four = result.points[1]
    assert (four.values(BASELINE, DEPTH), four.values(BACKWARD, DEPTH)) == ([12], [9])
    assert all(point.values(name, OF_PAPER) == [1] for point in result.points for name in (BASELINE, BACKWARD))


def test_bytes_by_hand() -> None:
    """Three layers of 1, 10 and 100 bytes, SGD with momentum, one step."""
    sizes = {1: 1, 2: 10, 3: 100}
    plain, fused = (traffic(order(3), sizes, 1) for order in (baseline, backward_fusion))
    # forward; output gradients of layers 2 and 3, the last one right behind its forward pass; gradients added up;
    # the update reads parameters, gradients and momentum, of layer 1 the gradient is still there
    assert plain[READ] == 111 + 10 + 111 + 3 * 111 - 1
    assert plain[WRITTEN] == fused[WRITTEN] == 111 + 3 * 111
    assert plain[READ] - fused[READ] == 2 * (10 + 100)
    assert (plain[MERGED, 2], fused[MERGED, 2]) == (0, 2)


def test_forward_fusion_merges_across_steps() -> None:
    sizes = {1: 1, 2: 10, 3: 100}
    one, two = (traffic(forward_fusion(3, steps=steps), sizes, 1) for steps in (1, 2))
    plain = [traffic(baseline(3, steps=steps), sizes, 1) for steps in (1, 2)]
    assert one == plain[0]
    assert (plain[1][READ] - plain[0][READ]) - (two[READ] - one[READ]) == 111  # parameters, just updated
    assert two[MERGED, 2] == 1


def test_merged_reads_a_layer(tmp_path: Path) -> None:
    result = run(
        Transactions(), tmp_path, "experiment=fusion_fig2", "~models", f"+models={{mlp: {MLP}}}", "~optimizers.Adam"
    )
    (point,) = result.points
    assert [point.values(name, MERGED) for name in (BASELINE, FORWARD, BACKWARD)] == [[0], [1], [2]]
    assert point.values(BACKWARD, READ)[0] < point.values(FORWARD, READ)[0] < point.values(BASELINE, READ)[0]
    assert "forward-fusion saves" in Transactions().notes(result)[1]
