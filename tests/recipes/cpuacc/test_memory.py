"""`cpuacc_memory` in small: two batch sizes on two ranks, and how many images what is saved is worth."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from retime.recipes.core.results import Point, Row
from retime.recipes.cpuacc.memory import GROWN, Memory, image_mib, more_images
from retime.recipes.cpuacc.targets import claim
from support.recipes import assert_draws, settings_for

SMALL = [
    "experiment=cpuacc_memory",
    "rounds=1",
    "steps=2",
    "batch_sizes=[1,2]",
    "cases.VGG-16.model.width=0.03125",
]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_it_measures_both_batch_sizes(tmp_path: Path) -> None:
    settings = settings_for(*SMALL)
    few = ("ddp, 25 MiB", "cpu_accumulate_ddp, 25 MiB")
    settings = replace(settings, variants={label: settings.variants[label] for label in few})
    recipe = Memory()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    assert [point.at["images"] for point in result.points] == [1, 2]
    assert all(point.values(label, GROWN)[0] > 0 for point in result.points for label in few)
    assert [line.against for line in recipe.compare(result)] == [claim("images")]
    assert_draws(recipe, result, tmp_path)


def test_what_is_saved_is_given_to_images() -> None:
    def point(images: int, theirs: float, ours: float) -> Point:
        rows = [Row("ddp", GROWN, "MiB", [theirs]), Row("cpu_accumulate_ddp", GROWN, "MiB", [ours])]
        return Point(at={"network": "N", "ranks": 2, "images": images}, settings={}, rows=rows)

    few, many = point(10, 120, 100), point(20, 140, 120)
    assert image_mib(few, many, "ddp") == 2
    assert more_images(few, many, "cpu_accumulate_ddp", "ddp").median == 1.5  # 20 MiB are 10 images more than 20
