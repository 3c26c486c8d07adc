"""Counts by reason, as reports print them."""

from retime.foundations.messages import because


def test_reasons_are_joined_in_the_order_in_which_they_came_up() -> None:
    assert because({"it froze": 2, "it rained": 1}) == "2 because it froze; 1 because it rained"
    assert because({"it froze": 2, "it rained": 1}, "stayed") == "2 stayed because it froze; 1 stayed because it rained"
    assert because({}) == ""
