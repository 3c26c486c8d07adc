"""Steps, work and memory of a scan on p workers: closed forms, counts by hand, and the recipe at small sizes."""

from math import log2
from pathlib import Path

import pytest
from rich.console import Console

from retime.mechanisms.scan import scan_plan
from retime.recipes.bppsa.scan_workers import (
    LINEAR,
    MEMORY,
    ORDER_OF_STEPS,
    PIPELINE,
    SCAN,
    STEPS,
    WORK,
    ScanWorkers,
    jacobians_kept,
    steps_on,
)
from retime.schedules.pipeline import StageCosts, block, gpipe, simulate_pipeline
from support.recipes import ran, settings_for


@pytest.mark.parametrize("n", [3, 7, 63, 1023])
def test_closed_forms_of_a_whole_tree(n: int) -> None:
    products = 2 * n - round(log2(n + 1))
    assert len(scan_plan(n).steps) == steps_on(n, 1) == products
    assert steps_on(n, n + 1) == 2 * log2(n + 1) - 1
    steps = [steps_on(n, p) for p in (1, 2, 4, n + 1)]
    assert steps == sorted(steps, reverse=True)


def test_steps_by_hand() -> None:
    """7 Jacobians, level by level: 4, 2 and 1 products up, 1 and 3 down."""
    assert [steps_on(7, p) for p in (1, 2, 3, 4)] == [11, 2 + 1 + 1 + 1 + 2, 2 + 1 + 1 + 1 + 1, 5]


def test_jacobians_by_hand() -> None:
    """Of 3: M_1 goes when it has met the gradient, then M_3 M_2 is made beside both, and M_3 goes."""
    assert jacobians_kept(3, 1) == 3
    assert jacobians_kept(3, 3) == 3  # the worker of M_3: that, M_2 received, and their product
    assert jacobians_kept(1023, 1024) == 3
    assert jacobians_kept(1023, 1) == 1023


def test_a_pipeline_stores_an_activation_a_micro_batch() -> None:
    for ranks in (2, 4, 8):
        stages = block(ranks, ranks)
        ran = simulate_pipeline(gpipe(stages, ranks), stages, StageCosts.uniform(ranks))
        assert set(ran.peak_activations) == {ranks}


def test_the_recipe(tmp_path: Path) -> None:
    settings = settings_for("experiment=bppsa_workers", "matrices=[7,15]", "workers=[1,8,16]")
    recipe = ScanWorkers()
    result = ran(recipe, settings, tmp_path)
    assert [tuple(point.at.values()) for point in result.points] == [(7, 1), (7, 8), (15, 1), (15, 8), (15, 16)]
    one, *_, many = result.points
    assert one.values(SCAN, WORK) == one.values(SCAN, STEPS) == [11]
    assert one.values(LINEAR, STEPS) == [7]
    assert many.values(SCAN, STEPS) == [7]
    assert many.values(SCAN, ORDER_OF_STEPS) == [round(7 / log2(15), 4)]
    assert many.values(PIPELINE, MEMORY) == [17]
    console = Console(record=True, width=160)
    recipe.show(result, console)
    assert "products over n: 1.57 to 1.73, of 5 points" in console.export_text()
