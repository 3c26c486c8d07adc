"""The search for k (section 5.1): which k it measures, in which order, and where it ends."""

import math

import pytest

from retime.schedules import KSearch


def searched(layers, time, **options):
    search = KSearch(layers, **options)
    while (k := search.next_k) is not None:
        search.record(time(k))
    return search


def test_path_of_the_paper():
    """L = 40: steps of 4, then 2 and 1 around the best."""
    search = searched(40, lambda k: 1 + (k - 27) ** 2)
    assert list(search.measured) == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 26, 30, 25, 27]
    assert search.best == 27


def test_odd_step_leaves_no_gap():
    """L = 50: around 20 a step of 5 leaves 16 to 24, which steps of 2 reach."""
    search = searched(50, lambda k: 1 + abs(k - 23))
    assert list(search.measured)[10:] == [21, 23, 27, 29, 22, 24]
    assert search.best == 23


@pytest.mark.parametrize("layers", [*range(1, 31), 45, 73, 101])
def test_finds_the_optimum_of_every_curve_with_one_valley(layers):
    for optimum in range(layers):
        search = searched(layers, lambda k, optimum=optimum: 1 + abs(k - optimum) * (2 if k > optimum else 1))
        assert search.best == optimum
        assert len(search.measured) <= 10 + 2 * (1 + math.ceil(math.log2(1 + layers / 10))), list(search.measured)


@pytest.mark.parametrize(("layers", "first_pass"), [(1, 1), (2, 2), (9, 9), (10, 10), (11, 6), (12, 6), (19, 10)])
def test_first_pass_has_at_most_ten_stops(layers, first_pass):
    search = searched(layers, lambda k: 1 + k)
    step = math.ceil(layers / 10)
    assert list(search.measured)[:first_pass] == list(range(0, layers, step))


def test_largest_bounds_every_k():
    search = searched(100, lambda k: 100 - k, largest=7)
    assert list(search.measured) == list(range(8))
    assert searched(100, lambda k: 1000 - k, largest=33).best == 33
    assert list(searched(5, lambda k: 1, largest=0).measured) == [0]
    assert max(searched(5, lambda k: 10 - k, largest=9).measured) == 4


def test_budget_ends_with_the_best_so_far():
    search = searched(40, lambda k: 1 + abs(k - 27), budget=4)
    assert list(search.measured) == [0, 4, 8, 12]
    assert search.best == 12
    assert search.next_k is None


def test_ties_go_to_the_smaller_k():
    search = searched(9, lambda k: 2.0 if k < 3 else 1.0)
    assert search.best == 3
    assert KSearch(9).best == 0


def test_resumes_from_its_own_numbers():
    whole = searched(73, lambda k: 1 + abs(k - 31))
    resumed = KSearch(73)
    for count, (k, seconds) in enumerate(whole.measured.items()):
        assert resumed.next_k == k
        resumed.record(seconds)
        again = KSearch(73)
        for known in resumed.measured.values():
            again.record(known)
        assert again.next_k == resumed.next_k, count
    assert resumed.next_k is None


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_refuses_what_is_no_time_and_stays_where_it_was(seconds):
    search = KSearch(12)
    search.record(1.0)
    with pytest.raises(ValueError, match=r"seconds=.* at k=2: give the measured time"):
        search.record(seconds)
    assert search.next_k == 2
    assert list(search.measured) == [0]


def test_refuses_a_record_after_the_end():
    search = searched(3, lambda k: 3 - k)
    with pytest.raises(RuntimeError, match="has ended with k=2"):
        search.record(1.0)
