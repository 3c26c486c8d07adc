"""Titles of pictures say where and at which sizes was measured, as the points' settings have it."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.results import Point, Result, hardware_line, heading, sizes, titled


def result(*settings: dict[str, object], simulated: bool = False, **at: list[str]) -> Result:
    points = [
        Point({key: names[number] for key, names in at.items()}, one, [], hardware={"processor": "A", "cores": "2"})
        for number, one in enumerate(settings)
    ]
    return Result("x", "a.Recipe", "paper", "Figure 1", "A title", points, simulated=simulated)


def test_sizes_are_those_of_images_networks_and_batches() -> None:
    one = {"model": {"_target_": "vgg", "width": 0.5, "image_size": 64}, "data": {"image_size": 64}, "batch_size": 32}
    assert sizes(result(one)) == "64 px, width 0.5, batch 32"
    assert sizes(result({"rounds": 3, "batch_size": None})) == ""
    # a batch is the case's own, and none along its axis
    assert sizes(result({"batch_size": 256, "case": {"batch_size": 16}})) == "batch 16"
    assert sizes(result({"batch_size": 16}, B=["32"])) == ""
    assert sizes(result({"batch_size": 16}, simulated=True)) == ""


def test_sizes_of_some_points_name_them() -> None:
    narrow = {"case": {"model": {"width": 0.5, "layers": 2}, "batch_size": 8}}
    whole = {"case": {"model": {"layers": 2}, "batch_size": 32}}
    both = sizes(result(narrow, whole, network=["VGG", "GRU"]))
    assert both == "width 0.5 (VGG), 2 layers, batch 8 (VGG), batch 32 (GRU)"
    many = [{"batch_size": number} for number in (4, 64, 16)]
    assert sizes(result(*many, case=["a", "b", "c"])) == "batch 4 to 64"
    crowd = [*({"width": 2, "layers": 1 + number % 2} for number in range(6)), {}]
    assert sizes(result(*crowd, case=list("abcdefg"))) == "width 2, 1 to 2 layers"


def test_a_title_has_machine_and_sizes_below_it() -> None:
    pinned = {"hardware": {"name": "cpu", "cores": 1}, "batch_size": 4}
    assert titled(result(pinned)) == "A title\nA, 1 core; batch 4"
    assert titled(result({}), "2 hosts") == "A title, 2 hosts\nA, 2 cores"
    long = [{"width": 1 + number // 2, "image_size": 32} for number in range(3)]
    named = [f"a network with a rather long name, {number}" for number in range(4)]
    assert titled(result(*long, {**pinned, "image_size": 32}, case=named)) == "A title\nA, 2 cores and A, 1 core; 32 px"
    assert titled(result(*long, long[2], case=named)) == "A title\nA, 2 cores; 32 px, width 1 to 2"
    assert hardware_line(result({}, simulated=True)) == "simulated"
    for where in ("Figure 1", "Figure 1, simulated"):
        one = replace(result({}, simulated=True), where=where, title="Time of a step, simulated")
        for text in (heading(one), titled(one), titled(one, "2 GPUs")):
            assert text.count("simulated") == 1, text


def test_a_whisker_is_that_of_the_whole() -> None:
    axes = Figure().add_subplot()
    whole = spread([10.0, 11.0, 12.0, 13.0, 20.0])  # its parts' medians add up to 9
    charts.stacked_bars(axes, {"bar": {"forward": 4.0, "backward": 5.0}}, "ms", {"bar": whole})
    (container,) = [one for one in axes.containers if one.get_label() == "_nolegend_" or hasattr(one, "has_xerr")]
    low, high = container.lines[2][0].get_segments()[0][:, 0]
    assert (low, high) == pytest.approx((11.0, 13.0))
    assert container.lines[0].get_xdata()[0] == pytest.approx(12.0)


def test_no_picture_is_wider_than_a_page_shows(tmp_path: Path) -> None:
    drawing, _ = charts.figure("wide", width=20.0)
    charts.save(drawing, tmp_path / "wide.png")
    width = int.from_bytes((tmp_path / "wide.png").read_bytes()[16:20], "big")
    assert width == charts.MOST_PIXELS
