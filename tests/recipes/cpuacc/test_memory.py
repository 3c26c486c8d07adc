"""`cpuacc_memory` and `cpuacc_update` in small: images that what is saved is worth, and a rank's state and memory."""

import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import Hardware
from retime.recipes.cpuacc import memory
from retime.recipes.cpuacc.memory import GROWN, STATE, STEP, ZERO, Memory, Updates, image_mib, more_images
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.targets import claim, target
from support.recipes import ran, settings_for

SMALL = (*("experiment=cpuacc_memory", "rounds=1", "steps=2", "batch_sizes=[1,2]", "cases.VGG-16.model.width=0.03125"),)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@pytest.mark.long
def test_it_measures_both_batch_sizes(tmp_path: Path) -> None:
    settings = settings_for(*SMALL)
    few = ("ddp, 25 MiB", "cpu_accumulate_ddp, 25 MiB")
    settings = replace(settings, variants={label: settings.variants[label] for label in few})
    recipe = Memory()
    result = ran(recipe, settings, tmp_path)
    assert [point.at["images"] for point in result.points] == [1, 2]
    assert all(point.values(label, GROWN)[0] > 0 for point in result.points for label in few)
    assert [line.against for line in recipe.compare(result)] == [claim("images")]


def test_what_is_saved_is_given_to_images() -> None:
    def point(images: int, theirs: float, ours: float) -> Point:
        rows = [Row("ddp", GROWN, "MiB", [theirs]), Row("cpu_accumulate_ddp", GROWN, "MiB", [ours])]
        return Point(at={"network": "N", "ranks": 2, "images": images}, settings={}, rows=rows)

    few, many = point(10, 120, 100), point(20, 140, 120)
    assert image_mib(few, many, "ddp") == 2
    assert more_images(few, many, "cpu_accumulate_ddp", "ddp").median == 1.5  # 20 MiB are 10 images more than 20


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@pytest.mark.long
def test_a_rank_holds_its_share_of_the_state(tmp_path: Path) -> None:
    small = ("rounds=1", "steps=2", "rank_counts=[2]", "cases.VGG-16.model.width=0.125")
    settings = settings_for("experiment=cpuacc_update", *small)
    recipe = Updates()
    result = ran(recipe, settings, tmp_path)
    (point,) = result.points
    assert point.facts["the same final weights"] == list(settings.variants)
    held = {label: point.values(label, STATE)[0] for label in settings.variants}
    whole = 2 * point.facts["parameters' bytes"] / 2**20
    assert held["ddp"] == held["cpu_accumulate_ddp"] == pytest.approx(whole, rel=0.01)
    assert held["update_on_host"] == pytest.approx(whole / 2, rel=0.1)
    assert whole / 2 <= held[ZERO] < whole, "the rank with most; it divides whole tensors"
    assert all(point.values(label, quantity)[0] > 0 for label in held for quantity in (GROWN, STEP))
    wanted = ("share", "memory", "speed", "zero-memory", "zero-speed")
    assert [line.against for line in recipe.compare(result)] == [target(name) for name in wanted]
    assert f"the same final weights: ddp, {ZERO}, cpu_accumulate_ddp, update_on_host" in recipe.notes(result)[1]


def test_starts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Mock(return_value=[{STATE: 1, GROWN: 1, STEP: 1.0, "weights": "x", "parameters": 4}])
    monkeypatch.setattr(memory, "ask", ask)
    settings = AccumulationSettings(hardware=Hardware("cpu", "cpu"), rounds=3, variants={n: {"name": n} for n in "abc"})
    measured = Updates().measure(settings, {"network": "N", "ranks": 2}, print)
    assert "".join(call.kwargs["strategy"]["name"] for call in ask.mock_calls) == "abcbcacab"
    assert [(row.variant, len(row.values)) for row in measured.rows[::3]] == [("a", 3), ("b", 3), ("c", 3)]


def test_the_last_is_compared_with_the_first() -> None:
    numbers = {"ddp": (100.0, 400.0, 30.0), "other": (100.0, 410.0, 25.0), "ours": (30.0, 340.0, 20.0)}
    rows = [
        Row(label, quantity, "", [value])
        for label, values in numbers.items()
        for quantity, value in zip((STATE, GROWN, STEP), values, strict=True)
    ]
    point = Point(at={"network": "N", "ranks": 4}, settings={}, rows=rows)
    result = Result.__new__(Result)
    object.__setattr__(result, "points", [point])
    measured = [line.measured.median for line in Updates().compare(result) if line.measured is not None]
    assert measured == pytest.approx([1.2, 0.85, 1.5])
