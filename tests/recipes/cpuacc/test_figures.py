"""`cpuacc_fig3` in small: one network on two ranks, beside what the paper says."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from retime.recipes.cpuacc.figures import EXPOSED, Figures, efficiency
from retime.recipes.cpuacc.naive import NAIVE
from retime.recipes.cpuacc.targets import STEP, claim
from retime.recipes.cpuacc.worker import ALONE
from support.recipes import assert_draws, settings_for

SMALL = [
    "experiment=cpuacc_fig3",
    "~cases.AlexNet",
    "~cases.GoogLeNet",
    "rank_counts=[2]",
    "rounds=1",
    "warmup_rounds=0",
    "steps=1",
    "cases.VGG-16.batch_size=2",
    "cases.VGG-16.model.width=0.03125",
]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_it_measures_and_draws(tmp_path: Path) -> None:
    settings = settings_for(*SMALL)
    few = ("ddp, 25 MiB", "cpu_accumulate_ddp, 25 MiB", NAIVE)
    settings = replace(settings, variants={label: settings.variants[label] for label in few})
    recipe = Figures()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    (point,) = result.points
    assert point.variants(STEP) == [*settings.variants, ALONE]
    assert point.facts["the same final weights"] == list(settings.variants)
    assert point.has("cpu_accumulate_ddp, 25 MiB", EXPOSED)
    assert efficiency(point, ALONE).median == 1
    assert list(recipe.references(point).values()) == ["ddp, 25 MiB", NAIVE]
    claims = [line.against for line in recipe.compare(result)]
    assert claims.count(claim("scaling")) == 3
    assert claims.count(claim("figure-3 VGG-16")) == 2, "over ddp, and over the paper's own baseline"
    assert len(claims) == 5
    assert_draws(recipe, result, tmp_path)
