"""`cpuacc_fig3` and `cpuacc_training` in small.

A network on two ranks beside what the paper says; outputs checked every step are ddp's on two ranks, those of ordered
sums on four.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from retime.recipes.cpuacc.figures import (
    DIFFERENCE,
    EXPOSED,
    FROM_ORDER,
    FROM_REPEAT,
    RIGHT,
    SECONDS_TO,
    STEPS_TO,
    Figures,
    Trainings,
    efficiency,
)
from retime.recipes.cpuacc.naive import NAIVE
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.targets import STEP, claim, target
from retime.recipes.cpuacc.worker import ALONE
from support.recipes import ran, settings_for

SMALL = (
    *("experiment=cpuacc_fig3", "~cases.AlexNet", "~cases.GoogLeNet", "rank_counts=[2]", "rounds=1"),
    *("warmup_rounds=0", "steps=1", "cases.VGG-16.batch_size=2", "cases.VGG-16.model.width=0.03125"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@pytest.mark.long
def test_it_measures_and_draws(tmp_path: Path) -> None:
    settings = settings_for(*SMALL)
    few = ("ddp, 25 MiB", "cpu_accumulate_ddp, 25 MiB", NAIVE)
    settings = replace(settings, variants={label: settings.variants[label] for label in few})
    recipe = Figures()
    result = ran(recipe, settings, tmp_path)
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


TRAINING = (
    *("experiment=cpuacc_training", "rank_counts=[2,4]", "rounds=1", "steps=3", "check_every=1", "accuracy=0.0"),
    *("cases.AlexNet.batch_size=2", "cases.AlexNet.model.width=0.03125", "cases.AlexNet.held_out_size=8"),
)


@pytest.fixture
def settings() -> AccumulationSettings:
    return settings_for(*TRAINING)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@pytest.mark.long
def test_outputs_are_the_same(settings: AccumulationSettings, tmp_path: Path) -> None:
    recipe = Trainings()
    result = ran(recipe, settings, tmp_path)
    two, _ = result.points
    for point in result.points:
        first, *ours = settings.variants
        assert point.variants(SECONDS_TO) == [first, *ours]
        for label in settings.variants:
            assert point.values(label, STEPS_TO) == [1]
            assert len(point.values(label, RIGHT)) == 3
            assert point.values(label, FROM_REPEAT) == [0]
        for label in set(ours) - {NAIVE}:  # which adds up along a tree
            assert point.values(label, FROM_ORDER) == [0]
        assert point.facts["all ranks answer the same"] is True
    assert all(two.values(label, DIFFERENCE) == [0] for label in settings.variants)
    claims = [line.against for line in recipe.compare(result)]
    sooner, steps = claim("sooner"), target("same-steps")
    same = [target(name) for name in ("same-outputs", "in-order", "repeated")]
    assert claims[:7] == [sooner, sooner, steps, *same, sooner]
    assert claims[13:18] == [sooner, sooner, steps, *same[1:]]
    assert "looked at every 1 steps" in recipe.notes(result)[1]


def test_an_accuracy_that_is_not_reached_says_what_to_change(settings: AccumulationSettings, tmp_path: Path) -> None:
    few = {label: settings.variants[label] for label in ("ddp",)}
    with pytest.raises(ValueError, match=r"ddp has at most .* after 3 steps, and accuracy=1.1 is asked for"):
        Trainings().run(replace(settings, variants=few, accuracy=1.1), tmp_path, Console(quiet=True))
