"""`cpuacc_targets` in small: sums and fits on two ranks, what they are held against, and the picture."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from retime.recipes.cpuacc.targets import STEP, SUM, Targets, target
from retime.recipes.cpuacc.worker import ALONE, COPY, GLOO, HOST, PIECES
from support.recipes import assert_draws, settings_for

SMALL = [
    "experiment=cpuacc_targets",
    "rank_counts=[2]",
    "sizes_mb=[1]",
    "rounds=1",
    "warmup_rounds=0",
    "steps=1",
    "repeats=3",
    "cases.VGG-like.batch_size=2",
    "cases.VGG-like.model.width=0.03125",
    "cases.VGG-like.model.hidden=512",
]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_it_measures_and_reports(tmp_path: Path) -> None:
    settings = settings_for(*SMALL)
    few = ("ddp, 25 MiB", "cpu_accumulate_ddp, 25 MiB", "ooo_ddp on host")
    settings = replace(settings, variants={label: settings.variants[label] for label in few})
    recipe = Targets()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    sums, fit = result.points
    assert sums.variants(SUM) == [HOST, GLOO, PIECES, COPY]
    assert sums.facts["same bits"] is True
    assert sums.facts["how"] == "2 ranks in shared memory"
    assert fit.variants(STEP) == [*settings.variants, ALONE]
    assert fit.facts["the same final weights"] == list(settings.variants)
    wanted = [line.against for line in recipe.compare(result)[:5]]
    assert wanted == [target(name) for name in ("over-gloo", "of-copy", "same", "in-fit", "out-of-order")]
    assert any("exposed communication" in note for note in recipe.notes(result))
    assert_draws(recipe, result, tmp_path)
