"""Algorithm 2 and Figure 4: the orders, their times, and the k that memory allows."""

import pytest

from retime.schedules import (
    Schedule,
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


def test_figure_4_has_another_optimum_at_k_4():
    assert [figure_4(k).makespan_ms for k in range(5)] == [29, 29, 27, 25, 25]


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


def test_a_k_of_more_than_all_layers_is_refused():
    with pytest.raises(ValueError, match=r"k=4: give 0 .* to 3, the number of layers"):
        reverse_first_k(3, 4)


def test_round_trip():
    schedule = reverse_first_k(5, 3, steps=2)
    assert Schedule.parse(str(schedule)) == schedule
