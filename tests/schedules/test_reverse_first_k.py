"""Algorithm 2 and Figure 4: the orders, their times, the k that memory allows, and the search for k (section 5.1)."""

import math

import pytest

from retime.schedules import (
    KSearch,
    ScheduleError,
    backward_to_forward,
    communicate_last,
    largest_k,
    reverse_first_k,
    simulate,
    step_buffers,
    validate,
)

FIGURE_4_UNITS = {"F": 2, "O": 1, "W": 1, "S": 3}
LOSS = 6


def figure_4(k, last=()):
    schedule = communicate_last(reverse_first_k(6, k, steps=2, without_weights={LOSS}), last)
    return simulate(backward_to_forward(schedule), FIGURE_4_UNITS, {"S": "network"})


def test_algorithm_2():
    assert str(reverse_first_k(4, 0)) == "F1 F2 F3 F4 W4 S4 O4 W3 S3 O3 W2 S2 O2 W1 S1"
    assert reverse_first_k(4, 1) == reverse_first_k(4, 0)
    assert str(reverse_first_k(4, 3)) == "F1 F2 F3 F4 W4 S4 O4 O3 O2 W1 S1 W2 S2 W3 S3"
    assert str(reverse_first_k(4, 4)) == "F1 F2 F3 F4 O4 O3 O2 W1 S1 W2 S2 W3 S3 W4 S4"


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_k_is_a_valid_order_of_the_same_tasks(layers, steps):
    for k in range(layers + 1):
        schedule = reverse_first_k(layers, k, steps=steps)
        validate(schedule)
        validate(schedule.split({"S": "network"}))
        validate(communicate_last(schedule, {layers}))
        assert sorted(schedule) == sorted(reverse_first_k(layers, 0, steps=steps))


def test_figure_4_takes_29_28_and_25_units():
    """One unit less from (a) to (b), three less from (b) to (c): 16 % and 12 %, as the text says."""
    conventional, prioritised, reversed_3 = figure_4(0), figure_4(0, last={5}), figure_4(3)
    assert [t.makespan_ms for t in (conventional, prioritised, reversed_3)] == [29, 28, 25]
    assert conventional.makespan_ms / reversed_3.makespan_ms == 1.16
    assert prioritised.makespan_ms / reversed_3.makespan_ms == 1.12
    assert [figure_4(k).makespan_ms for k in range(5)] == [29, 29, 27, 25, 25], "k = 4 is as good"


def test_figure_4_c_hides_w1s_communication_behind_w2_and_w3():
    timeline = figure_4(3)
    start = {str(task): start_ms for task, start_ms in timeline.start_ms.items()}
    assert (start["W1"], start["W2"], start["W3"]) == (7, 8, 9)
    assert (start["S1"], start["F1'"]) == (8, 11)


def test_communicate_last_moves_only_what_it_is_told():
    schedule = reverse_first_k(4, 0, steps=2)
    moved = communicate_last(schedule, {4, 3})
    assert str(backward_to_forward(moved)) == "W4 O4 W3 O3 W2 S2 O2 W1 S1 S4 S3 F1' F2' F3' F4'"
    assert communicate_last(schedule, ()) == schedule
    assert communicate_last(schedule, {1}) == schedule
    assert communicate_last(schedule, {1, 2, 3, 4}) == schedule
    with pytest.raises(ScheduleError, match=r"lanes compute, network: prioritise before split"):
        communicate_last(schedule.split({"S": "network"}), {4})
    for wrong in (schedule.split({"S": "network"}), reverse_first_k(4, 0)):
        with pytest.raises(ScheduleError, match="several lanes or only one step: cut two steps"):
            backward_to_forward(wrong)


def peak(layers, k, **sizes):
    schedule = reverse_first_k(layers, k)
    costs = {"F": 1, "O": 1, "W": 1, "S": 0}
    return simulate(schedule, costs, buffers=step_buffers(schedule, **sizes)).peak_bytes


SIZES = {"activation_bytes": 10, "output_gradient_bytes": 50, "weight_gradient_bytes": {1: 1, 2: 2, 3: 4, 4: 8, 5: 16}}


def test_largest_k_is_the_last_that_fits():
    peaks = [peak(5, k, **SIZES) for k in range(5)]
    assert peaks == sorted(peaks), "the sizes are chosen so that deferring costs memory"
    for limit in range(peaks[0], peaks[-1] + 3):
        k = largest_k(5, limit, **SIZES)
        assert peaks[k] <= limit
        assert k == 4 or peaks[k + 1] > limit


def test_peak_of_a_step_by_hand():
    """L = 2, k = 2: W1 keeps Y0 and dY2, W2 keeps Y1 and runs last."""
    sizes = {
        "activation_bytes": {0: 100, 1: 10},
        "output_gradient_bytes": {2: 7},
        "weight_gradient_bytes": {1: 3, 2: 5},
    }
    # conventional: W2 (Y0 Y1 dW2), O2 adds dY2, W1 has let Y1 go
    assert peak(2, 0, **sizes) == 100 + 10 + 5 + 7
    # deferred: O2 (Y0 Y1 dY2), W1 adds dW1, W2 runs with Y1 dW1 dW2
    assert peak(2, 2, **sizes) == 100 + 10 + 7 + 3


def test_measured_peak_counts_what_the_sizes_leave_out():
    peaks = [peak(5, k, **SIZES) for k in range(5)]
    assert largest_k(5, 1000 + peaks[2], plain_peak_bytes=1000 + peaks[0], **SIZES) == largest_k(5, peaks[2], **SIZES)
    assert largest_k(5, 10**9, plain_peak_bytes=1000, **SIZES) == 4


def test_max_memory_below_the_plain_peak_is_refused():
    with pytest.raises(
        ValueError, match=r"max_memory=99 is below the 100 bytes .* give at least 100, or make the batch"
    ):
        largest_k(5, 99, plain_peak_bytes=100, **SIZES)


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
