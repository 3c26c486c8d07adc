"""Pictures on moDNN: no panel without data, no entry of a legend twice, a mark for what is missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Annotation

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.recipe import Recipe
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.modnn.power import ENERGY, MEAN, MOST, NO_METER, Power
from retime.recipes.modnn.rank_worker import EACH, ONCE, ONE, WHOLE
from retime.recipes.modnn.ranks import REFUSED, Ranks
from retime.recipes.modnn.side_by_side import BUDGET, FAILURES, GIVING_BACK, MEASURED, PREDICTED, STEP, UNLIMITED
from retime.recipes.modnn.simulated import BATCH, MODNN, MOVED, SLOWER, ManyBudgets, OneBudget
from retime.recipes.modnn.targets import Targets

Draw = Callable[..., Any]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Draw:
    """Draws points with a recipe; returns matplotlib's figure, which has been saved once."""
    kept: list[Any] = []
    save = charts.save

    def keep(drawing: Any, path: Path) -> None:
        save(drawing, path)
        kept.append(drawing)

    monkeypatch.setattr(charts, "save", keep)

    def call(recipe: Recipe[Any], *points: Point) -> Any:
        recipe.draw(Result("", "", "modnn", "", "title", list(points)), tmp_path / "result.png")
        return kept[-1]

    return call


def entries(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def notes(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts if isinstance(text, Annotation)]


def power(*quantities: str) -> Point:
    rows = [Row(name, STEP, "ms", [1.0]) for name in (UNLIMITED, "50 %")]
    rows += [Row(name, each, "", [value]) for each in quantities for name, value in ((UNLIMITED, 10.0), ("50 %", 11.0))]
    rows.append(Row("50 %", BUDGET, "MiB", [5.0]))
    return Point({"network": "net"}, {}, rows, {"meter": "made up", "ideal peak MiB": 10.0})


def test_power_that_was_not_measured_is_a_text_with_the_reason(draw: Draw) -> None:
    figure = draw(Power(), Point({"network": "net"}, {}, [], {NO_METER: "no such folder"}))
    assert figure.axes == []
    (text,) = (each.get_text() for each in figure.texts if each.get_text() != "title")
    assert "net: not measured" in text
    assert "no such folder" in text


def test_power_has_a_panel_for_each_quantity_with_data(draw: Draw) -> None:
    absent = Point({"network": "other"}, {}, [], {NO_METER: "no such folder"})
    labels = [axes.get_ylabel().split(" (")[0] for axes in draw(Power(), absent, power(MEAN, MOST, ENERGY)).axes]
    assert labels == ["average power", "most power", "energy"]
    (only,) = draw(Power(), absent, power(ENERGY)).axes
    assert only.get_ylabel().startswith("energy")
    assert any(list(line.get_ydata()) == pytest.approx([1.1]) for line in only.lines)
    assert entries(only.get_legend()) == ["unlimited", "net"], "nothing of the network without a meter"


def trained(case: str, network: str, name: str) -> Point:
    rows = [Row(variant, STEP, "ms", [10.0]) for variant in (UNLIMITED, name)]
    for quantity, mib in ((BUDGET, 50.0), (PREDICTED, 40.0), (MEASURED, 41.0)):
        rows.append(Row(name, quantity, "MiB", [mib]))
    rows += [Row(GIVING_BACK, quantity, "MiB", [100.0]) for quantity in (PREDICTED, MEASURED)]
    failures: dict[str, Any] = {kind: {} for kind in FAILURES}
    return Point({"case": case, "network": network}, {}, rows, {"kind": "training", **failures})


def test_cases_of_one_network_differ_by_marker_and_no_entry_is_there_twice(draw: Draw) -> None:
    rows = [Row("1: A", each, "MiB", [9.0]) for each in (BUDGET, PREDICTED, MEASURED)]
    drawn = Point({"case": "random"}, {}, rows, {"kind": "random"})
    points = [trained("first", "A", "50 %"), trained("second", "A", "80 %"), trained("second", "B", "80 %"), drawn]
    figure = draw(Targets(), *points)
    networks, cases = figure.legends
    assert entries(networks) == ["A", "B"]
    assert entries(cases) == ["first", "random", "second", "within 5 %", "fastest unlimited"]
    assert all(axes.get_legend() is None for axes in figure.axes), "no data is below a legend"

    peaks, _ = figure.axes
    looks = {(line.get_marker(), line.get_markerfacecolor(), line.get_color()) for line in peaks.lines}
    assert len(looks) == len(points), "a look of its own each"


def simulated(budget: float, *fitting: str, network: str = "VGG") -> Point:
    rows = [Row(name, quantity, "", [1.004]) for name in fitting for quantity in (BATCH, SLOWER, MOVED)]
    facts = {"batch size": 8, "ideal memory GB": 20.0, "lower bound GB": 1.0}
    return Point({"network": network, "budget_gb": budget}, {}, rows, facts)


def test_figure_12_is_a_grid_and_crosses_budgets_that_do_not_fit(draw: Draw) -> None:
    ways = ManyBudgets._ways
    names = [f"net {number}" for number in range(4)]
    points = [simulated(12.0, *ways, network=name) for name in names]
    figure = draw(ManyBudgets(), *points, simulated(2.0, *list(ways)[1:], network=names[0]))
    assert [axes.get_title().split(" (")[0] for axes in figure.axes] == names, "no empty panel"
    places = [axes.get_subplotspec() for axes in figure.axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [notes(axes) for axes in figure.axes] == [["x"], [], [], []]
    (legend,) = figure.legends
    assert entries(legend) == ["lower bound", *ways, "does not fit"]
    (whole,) = draw(ManyBudgets(), points[0]).legends
    assert "does not fit" not in entries(whole)


def test_bars_of_figure_10_have_their_digits_and_the_cross_is_explained(draw: Draw) -> None:
    times, moved = draw(OneBudget(), simulated(12.0, MODNN)).axes
    assert notes(times).count("1.00") == 1
    assert notes(times).count("x") == notes(moved).count("x") == len(OneBudget._ways) - 1
    assert "does not fit" in entries(times.get_legend())
    everything, _ = draw(OneBudget(), simulated(12.0, *OneBudget._ways)).axes
    assert "does not fit" not in entries(everything.get_legend())


def test_figure_17_shows_measured_and_predicted_peaks_over_the_budget(draw: Draw) -> None:
    rows = [Row(way, STEP, "ms", [10.0]) for way in (ONE, WHOLE, ONCE, EACH)]
    rows += [Row(ONCE, each, "MiB", [mib]) for each, mib in ((BUDGET, 50.0), (MEASURED, 60.0), (PREDICTED, 40.0))]
    refused = Point({"network": "net", "budget": 5.0}, {}, [], {REFUSED: "too small"})
    speeds, peaks = draw(Ranks(), Point({"network": "net", "budget": 50.0}, {}, rows), refused).axes
    assert entries(speeds.get_legend()) == [ONE, WHOLE, ONCE, EACH]
    assert entries(peaks.get_legend()) == ["budget", MEASURED, PREDICTED]
    assert {(1.0, 1.0), (1.2,), (0.8,)} <= {tuple(line.get_ydata()) for line in peaks.lines}
    assert peaks.get_ylim()[0] == 0

    figure = draw(Ranks(), refused)
    assert figure.axes == []
    assert any("too small" in text.get_text() for text in figure.texts)


def test_a_marker_can_be_given_and_left_out_of_the_legend() -> None:
    _, (axes,) = charts.panels("", 1)
    charts.points_with_spread(axes, [1.0], [spread([2.0])], None, 1, marker="D", filled=False)
    line = axes.lines[0]
    assert (line.get_marker(), line.get_markerfacecolor()) == ("D", "white")
    assert axes.get_legend_handles_labels() == ([], [])
