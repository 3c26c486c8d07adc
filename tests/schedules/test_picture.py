"""Timelines as text."""

import pytest

from retime.schedules import Span, picture


def test_boxes_start_and_end_at_their_times():
    spans = [
        Span("W1", "compute", 1.0, 1.0),
        Span("F1", "compute", 0.0, 1.0),
        Span("mark", "compute", 0.5, 0.0),
        Span("S1", "network", 2.0, 2.0),
        Span("S2", "network", 5.0, 1.0),
    ]
    assert picture(spans, characters_per_ms=4) == "compute  |F1 |W1 |\nnetwork   .......|S1     |...|S2 |"


def test_boxes_meet_where_rounding_would_part_them():
    thirds = [Span(f"F{i}", "compute", i / 3, 1 / 3) for i in range(1, 4)]
    assert picture(thirds, characters_per_ms=10) == "compute  |F1|F2 |F3|"


def test_a_narrow_box_shows_the_start_of_its_name():
    assert picture([Span("backward", "compute", 0.0, 1.0)]) == "compute  |ba|"


def test_nothing_is_an_empty_picture():
    assert picture([]) == ""
    assert picture([Span("mark", "compute", 1.0, 0.0)]) == "compute"


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_a_scale_is_above_zero(scale):
    with pytest.raises(ValueError, match="characters_per_ms"):
        picture([Span("F1", "compute", 0.0, 1.0)], characters_per_ms=scale)


def test_overlaps_and_endless_lines_are_refused():
    with pytest.raises(ValueError, match="'F2' starts before"):
        picture([Span("F1", "compute", 0.0, 1.0), Span("F2", "compute", 0.5, 1.0)])
    with pytest.raises(ValueError, match="3000 characters long; give less"):
        picture([Span("F1", "compute", 0.0, 1000.0)])
