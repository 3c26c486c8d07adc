"""Places that Algorithm 1 finds in the backward pass, from times that are given."""

import pytest
import torch

from retime.mechanisms.two_streams import Setting
from retime.mechanisms.two_streams.regions import END, RegionProfile, StepTimes, cut, places_of

REGIONS = [["c"], ["b", "a"]]
SIZES = {"c": 100, "b": 10, "a": 10}
ALONE = StepTimes({"c": 0.0, "b": 4.0, "a": 8.0}, 12.0, {"c": (12.0, 16.0), "b": (16.0, 18.0), "a": (18.0, 19.0)})
OWN = StepTimes({"c": 0.0, "b": 8.0, "a": 12.0}, 16.0, {"c": (0.0, 8.0), "b": (8.0, 10.0), "a": (12.0, 13.0)})
LATER = StepTimes({"c": 0.0, "b": 4.0, "a": 8.0}, 12.0, {"c": (4.0, 8.0), "b": (12.0, 14.0), "a": (14.0, 15.0)})
IN_TURN = StepTimes({"c": 0.0, "b": 8.0, "a": 14.0}, 19.0, {"c": (0.0, 4.0), "b": (8.0, 10.0), "a": (14.0, 15.0)})
"""No pair gains: 4 ms of both in 8, 11 of the others in 11."""
IN_TURN_LATER = StepTimes({"c": 0.0, "b": 4.0, "a": 12.0}, 16.0, {"c": (4.0, 8.0)})


def test_weight_gradients_wait_for_the_region_in_which_they_gain_most() -> None:
    """Beside c, where they take turns, c's gain nothing; beside b and a they are free."""
    assert places_of(REGIONS, [ALONE, OWN, LATER], SIZES) == (None, {"c": "b"})


def test_where_nothing_gains_no_layer_is_chosen() -> None:
    assert places_of(REGIONS, [ALONE, IN_TURN, IN_TURN_LATER], SIZES) == (frozenset(), {})


def test_layers_that_gain_nowhere_stay_in_order() -> None:
    layers, places = places_of(REGIONS, [ALONE, OWN, IN_TURN_LATER], SIZES)
    assert (layers, places) == (frozenset({"b", "a"}), {})


@pytest.mark.parametrize(("most_bytes", "places"), [(120, {"c": "b"}), (50, {})])
def test_weight_gradients_run_once_ready_where_too_few_bytes_may_wait(most_bytes: int, places: dict[str, str]) -> None:
    assert places_of(REGIONS, [ALONE, OWN, LATER], SIZES, most_bytes) == (None, places)


def test_layers_that_were_not_timed_are_not_placed() -> None:
    alone = StepTimes(ALONE.begin, ALONE.end, {"c": (12.0, 16.0)})
    assert places_of(REGIONS, [alone, OWN, LATER], SIZES) == (frozenset(), {})


def test_regions_take_about_as_long() -> None:
    even = StepTimes({str(number): float(number) for number in range(8)}, 8.0)
    assert cut(even) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert cut(StepTimes({"0": 0.0, "1": 90.0, "2": 91.0}, 92.0)) == [["0"], ["1"], ["2"]]
    first = StepTimes({str(number): 0.1 * number for number in range(6)}, 60.0)
    assert [len(names) for names in cut(first)] == [3, 1, 1, 1]


def test_a_profile_without_layers_adds_no_setting() -> None:
    profile, settings = RegionProfile(torch.device("cpu")), [Setting(False), Setting(True)]
    while profile.next_step():
        assert profile.setting(settings[-1]) == Setting(True)
    assert profile.end(settings) == settings


def test_settings_say_how_many_wait() -> None:
    layers = frozenset({"a", "b"})
    assert str(Setting(True, layers=layers)) == "two streams for 2 layers"
    one = Setting(True, layers=layers, places=frozenset({("b", END)}))
    assert str(one) == "two streams for 2 layers, 1 of them in later regions"
