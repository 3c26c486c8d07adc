"""Counts by reason, as reports print them."""

from retime.foundations.messages import format_counts


def test_reasons_are_joined_in_the_order_in_which_they_came_up() -> None:
    assert format_counts({"it froze": 2, "it rained": 1}) == "2 because it froze; 1 because it rained"
    assert format_counts({"it froze": 2, "it rained": 1}, "left") == "2 left because it froze; 1 left because it rained"
    assert format_counts({}) == ""
