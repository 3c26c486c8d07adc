"""What a recipe has without writing it: points, axes and details from its settings, and the device it takes."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from retime.recipes.core.recipe import CaseRecipe, Measured, Recipe, Tick, result_folder
from retime.recipes.core.results import Result, Row
from retime.recipes.core.schema import Hardware, Settings


@dataclass
class Networks(Settings):
    cases: dict[str, Any] = field(default_factory=dict)
    rank_counts: list[int] = field(default_factory=list)


class OverBoth(Recipe[Networks]):
    over = (("network", "cases"), ("ranks", "rank_counts"))
    axes = ("steps",)
    simulated = True
    on_cpu = "trains on a CPU"
    asked = 0

    def measure(self, settings: Networks, at: dict[str, Any], tick: Tick) -> Measured:
        self.asked += 1
        return Measured([Row("a", "step", "ms", [1.0])])

    def draw(self, result: Result, path: Path) -> None: ...


class OverCases(CaseRecipe[Networks]):
    measure, draw = OverBoth.measure, OverBoth.draw


@pytest.fixture
def settings() -> Networks:
    hardware = Hardware("cpu", "cpu", None)
    names = {"name": "mine", "title": "t", "paper": "a-paper", "where": "Figure 1", "recipe": "x", "hardware": hardware}
    return Networks(**names, cases={"one": {"depth": 1}, "two": {"depth": 2}}, rank_counts=[2, 4], rounds=3)


def test_points_are_all_combinations_of_what_a_recipe_is_over(settings: Networks) -> None:
    at = [{"network": name, "ranks": ranks} for name in ("one", "two") for ranks in (2, 4)]
    assert OverBoth().points(settings) == at
    assert OverCases().points(settings) == [{"case": "one"}, {"case": "two"}]
    # and a point has the block behind its name
    assert OverBoth().detail(settings, {"network": "two", "ranks": 4}) == {"case": {"depth": 2}}
    assert OverBoth().detail(settings, {"ranks": 4}) == {}, "a point that a recipe adds"


def test_what_a_recipe_is_over_adds_points_to_the_same_figure(settings: Networks, tmp_path: Path) -> None:
    recipe = OverBoth()
    assert recipe.all_axes == ("steps", "cases", "rank_counts")
    assert result_folder(settings, ["rank_counts=[8]", "seed=1"], recipe.all_axes).parts[-1] == "seed=1"
    few = recipe.run(replace(settings, rank_counts=[2]), tmp_path, Console(quiet=True))
    assert (recipe.asked, few.simulated) == (2, True)
    assert len(recipe.run(settings, tmp_path, Console(quiet=True)).points) == 4
    assert recipe.asked == 4, "those with 2 ranks are kept"
    changed = {**settings.cases, "two": {"depth": 3}}
    recipe.run(replace(settings, cases=changed), tmp_path, Console(quiet=True))
    assert recipe.asked == 6, "those of the case that has changed are not"


@pytest.mark.parametrize(
    ("needed", "device", "place", "message"),
    [
        ((), "cuda", "p", "mine trains on a CPU: choose hardware=cpu"),
        (("plain",), "cpu", "p", "mine is drawn against plain: add it to variants"),
        ((), "cpu", "file/p", "result.json.part cannot be written .*: choose another results_dir"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_measured(
    settings: Networks, tmp_path: Path, needed: tuple[str, ...], device: str, place: str, message: str
) -> None:
    recipe, here = OverBoth(), replace(settings, hardware=Hardware("x", device, None))
    recipe.needed = needed
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        recipe.run(here, tmp_path / place, Console(quiet=True))
    assert recipe.asked == 0


def test_what_is_left_when_minutes_are_over_comes_in_the_next_call(settings: Networks, tmp_path: Path) -> None:
    recipe, none = OverBoth(), replace(settings, minutes=0.0)
    assert recipe.run(none, tmp_path, Console(quiet=True)).points == []
    assert len(recipe.run(replace(settings, rank_counts=[2]), tmp_path, Console(quiet=True)).points) == 2
    assert len(recipe.run(none, tmp_path, Console(quiet=True)).points) == recipe.asked == 2
    assert len(recipe.run(replace(settings, minutes=1e6), tmp_path, Console(quiet=True)).points) == 4


def test_ticks_are_known_where_the_variants_that_take_turns_are(
    settings: Networks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OverBoth().blocks(settings) is None
    monkeypatch.setattr(OverBoth, "turns", lambda recipe, settings: 5)
    assert OverBoth().blocks(settings) == 5 * (3 + settings.warmup_rounds)
