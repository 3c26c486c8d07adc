"""The simulator against timelines worked out by hand, and the examples in the docstrings."""

import doctest
import importlib
import math
import random

import pytest

from retime.schedules import (
    Buffer,
    Kind,
    Schedule,
    ScheduleError,
    Span,
    Task,
    baseline,
    dependencies,
    simulate,
    step_buffers,
)


def starts(timeline):
    return {span.name: span.start_ms for span in timeline.spans}


def test_one_lane_adds_up():
    timeline = simulate(Schedule.parse("F1 F2 O2 W2 W1"), {"F": 1, "F2": 2.5, "O": 3, "W": 0.5})
    assert starts(timeline) == {"F1": 0, "F2": 1, "O2": 3.5, "W2": 6.5, "W1": 7}
    assert timeline.makespan_ms == 7.5
    assert timeline.busy_ms == {"compute": 7.5}
    assert timeline.idle_ms == {"compute": 0}
    assert timeline.spans[1] == Span("F2", "compute", 1, 2.5, "forward")


def test_compute_and_network_overlap():
    """O3 W3 O2 W1 W2 on the device, each S on the network behind its W.

    ms       0  1  2  3  4  5  6  7  8
    compute  O3 W3 O2 W1 W2
    network        S3--- S1--- S2---
    """
    timeline = simulate(Schedule.parse("O3 W3 S3 O2 W1 S1 W2 S2"), {"O": 1, "W": 1, "S": 2}, {"S": "network"})
    assert starts(timeline) == {"O3": 0, "W3": 1, "O2": 2, "W1": 3, "W2": 4, "S3": 2, "S1": 4, "S2": 6}
    assert timeline.makespan_ms == 8
    assert timeline.idle_ms == {"compute": 3, "network": 2}
    assert timeline.end_ms[Task(Kind.S, 1)] == 6


def test_a_pipeline_of_two_devices_and_two_micro_batches():
    """Every task takes 1 ms; the device of the lower layer waits for gradients.

    ms    0    1    2    3    4    5    6    7
    gpu0  F1@0 F1@1 .    W1@0 .    .    W1@1
    gpu1  .    F2@0 O2@0 W2@0 F2@1 O2@1 W2@1
    """
    schedule = Schedule.parse("gpu0: F1@0 F1@1 W1@0 W1@1\ngpu1: F2@0 O2@0 W2@0 F2@1 O2@1 W2@1")
    timeline = simulate(schedule, lambda task: 1)
    assert starts(timeline) == {
        **{"F1@0": 0, "F1@1": 1, "W1@0": 3, "W1@1": 6},
        **{"F2@0": 1, "O2@0": 2, "W2@0": 3, "F2@1": 4, "O2@1": 5, "W2@1": 6},
    }
    assert timeline.makespan_ms == 7
    assert timeline.idle_ms == {"gpu0": 3, "gpu1": 1}

    device = {task: lane.name for lane in schedule.lanes for task in lane.tasks}
    far = simulate(schedule, lambda task: 1, delay_ms=lambda need, task: 0.5 * (device[need] != device[task]))
    assert far.start_ms[Task.parse("F2@0")] == 1.5
    assert far.makespan_ms == 1 + 0.5 + 5 + 0.5 + 1


def test_costs_prefer_the_more_exact_name():
    costs = {"F": 1, "F2": 2, "F2@1": 4, "F1'": 8}
    timeline = simulate(Schedule.parse("F1@0 F2@0 F1@1 F2@1 F1' F2'"), costs, needs={})
    assert [span.duration_ms for span in timeline.spans] == [1, 2, 1, 4, 8, 2]


def test_an_offload_takes_an_activation_off_the_device():
    """Three layers, activations of 10 bytes and a batch of 1; the copies take 2 ms on their own lane.

    ms       0  1  2  3  4  5  6  7  8  9
    compute  F1 F2 F3 O3 W3 .  O2 W2 W1
    copy        D1--- .  P1---             (P1 cannot start before it is issued behind D1)
    """
    costs = {"F": 1, "O": 1, "W": 1, "D": 2, "P": 2}
    plain = Schedule.parse("F1 F2 F3 O3 W3 O2 W2 W1")
    moved = Schedule.parse("compute: F1 F2 F3 O3 W3 O2 W2 W1\ncopy: D1 P1")
    sizes = {"activation_bytes": {0: 1, 1: 10, 2: 10, 3: 10}}
    kept = simulate(plain, costs, buffers=step_buffers(plain, **sizes))
    assert (kept.makespan_ms, kept.peak_bytes, kept.peak_ms) == (8, 31, 2)
    assert sorted(kept.peak_buffers) == ["Y0", "Y1", "Y2", "Y3"]

    early = simulate(moved, costs, buffers=step_buffers(moved, **sizes))
    # D1 ends at 3, P1 follows at once: the copy lane does not know that it is too early, so the peak stays
    assert (early.makespan_ms, early.peak_bytes) == (8, 31)

    def hold_back(need, task):
        """Issue P1 a millisecond after D1 has ended."""
        return float(str(task) == "P1")

    late = simulate(moved, costs, buffers=step_buffers(moved, **sizes), delay_ms=hold_back)
    assert starts(late) == {"F1": 0, "F2": 1, "F3": 2, "O3": 3, "W3": 4, "O2": 6, "W2": 7, "W1": 8, "D1": 1, "P1": 4}
    assert late.makespan_ms == 9
    assert late.idle_ms == {"compute": 1, "copy": 5}
    # Y1 is gone from 3 to 4 and the peak is where F3 runs while D1 still copies
    assert late.memory == ((0, 11), (1, 21), (2, 31), (3, 21), (4, 31), (5, 11), (8, 1), (9, 0))


def test_deferred_weight_gradients_keep_output_gradients():
    """W3 and W2 behind everything keep dY3 (and the activations) alive: the price that section 3 names."""
    costs = {"O": 1, "W": 1}
    conventional = Schedule.parse("O4 W4 O3 W3 O2 W2 W1")
    deferred = Schedule.parse("O4 O3 O2 W1 W2 W3 W4")
    peaks = [
        simulate(plan, costs, buffers=step_buffers(plan, output_gradient_bytes=100))
        for plan in (conventional, deferred)
    ]
    assert [timeline.peak_bytes for timeline in peaks] == [200, 300]
    assert peaks[1].peak_ms == 2
    assert peaks[1].peak_buffers == ("dY4", "dY3", "dY2")


def test_the_buffers_of_a_step():
    buffers = step_buffers(baseline(2), activation_bytes={0: 3, 1: 5}, output_gradient_bytes=7, weight_gradient_bytes=9)
    assert [
        (buffer.name, buffer.size_bytes, *(" ".join(map(str, tasks)) for tasks in (buffer.written_by, buffer.used_by)))
        for buffer in buffers
    ] == [
        ("Y0", 3, "F1", "F1 W1"),
        ("Y1", 5, "F1", "F1 F2 O2 W2"),
        ("dY2", 7, "O2", "W1"),
        ("dW2", 9, "W2", "U2"),
        ("dW1", 9, "W1", "U1"),
    ]


def test_activations_are_there_from_the_start_of_a_backward_plan():
    plan = Schedule.parse("O2 W2 W1")
    timeline = simulate(plan, lambda task: 1, buffers=step_buffers(plan, activation_bytes=10))
    assert timeline.memory == ((0, 30), (2, 10), (3, 0))


def test_micro_batches_share_one_weight_gradient():
    plan = Schedule.parse("W1@0 W1@1 U1")
    (buffer,) = step_buffers(plan, weight_gradient_bytes=8)
    assert buffer == Buffer("dW1", 8, (Task(Kind.W, 1, 0), Task(Kind.W, 1, 1)), (Task(Kind.U, 1),))


def test_memory_of_tasks_without_duration_counts():
    f1 = Task(Kind.F, 1)
    timeline = simulate(Schedule.parse("F1"), {"F": 0}, buffers=[Buffer("workspace", 64, (f1,), (f1,))])
    assert (timeline.makespan_ms, timeline.peak_bytes, timeline.peak_buffers) == (0, 64, ("workspace",))
    assert timeline.memory == ((0, 64), (0, 0))


def test_a_buffer_that_nothing_frees_stays():
    timeline = simulate(
        Schedule.parse("F1 F2"), {"F": 1}, buffers=[Buffer("parameters", 5), Buffer("leak", 2, (Task(Kind.F, 2),))]
    )
    assert timeline.memory == ((0, 5), (1, 7), (2, 0))
    assert (timeline.peak_bytes, timeline.peak_ms) == (7, 1)


def test_the_empty_schedule_takes_no_time():
    timeline = simulate(Schedule(()), {})
    assert (timeline.makespan_ms, timeline.peak_bytes, timeline.spans) == (0, 0, ())


def test_no_task_starts_before_its_needs_and_no_lane_does_two_at_once():
    rng = random.Random(2)
    for _ in range(50):
        layers = rng.randint(1, 8)
        schedule = baseline(layers, steps=2).split({"W": "second", "U": "update"})
        cost = {task: rng.randint(0, 9) / 2 for task in schedule}
        timeline = simulate(schedule, cost.__getitem__)
        for task, needs in dependencies(schedule).items():
            assert all(timeline.start_ms[task] >= timeline.end_ms[need] for need in needs)
        for lane in schedule.lanes:
            for earlier, later in zip(lane.tasks, lane.tasks[1:], strict=False):
                assert timeline.start_ms[later] >= timeline.end_ms[earlier]
            assert math.isclose(timeline.busy_ms[lane.name], sum(cost[task] for task in lane.tasks))
        # nothing waits without a reason: every task starts at 0 or when some other ends
        ends = {0.0, *timeline.end_ms.values()}
        assert set(timeline.start_ms.values()) <= ends
        assert max(timeline.busy_ms.values()) <= timeline.makespan_ms <= sum(cost.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": {"F": 1}}, "costs has no duration for W1: add 'W1' or 'W' in milliseconds"),
        ({"costs": {"F": 1, "W": -1}}, "the cost of W1 is -1: give 0 or more milliseconds"),
        ({"costs": lambda task: math.nan}, "the cost of F1 is nan"),
        ({"delay_ms": lambda need, task: -2}, "the delay between F1 and W1 is -2: give 0 or more milliseconds"),
        ({"resources": {"X": "network"}}, "resources has the key 'X'"),
        ({"buffers": [Buffer("Y9", 1, (Task(Kind.F, 9),))]}, "buffer 'Y9' names F9, which the schedule does not have"),
        (
            {"buffers": [Buffer("Y1", 1, (Task(Kind.U, 1),), (Task(Kind.F, 1),))]},
            "buffer 'Y1' is used before it is written",
        ),
    ],
)
def test_bad_input_says_what_to_change(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(Schedule.parse("F1 W1 U1"), **{"costs": {"F": 1, "W": 1, "U": 1}, **arguments})


def test_an_invalid_schedule_is_not_run():
    with pytest.raises(ScheduleError, match="W1 needs O2, which comes later"):
        simulate(Schedule.parse("W1 O2 W2"), lambda task: 1)


NAMES = [
    *("schedule", "simulate", "fusion", "timeline", "reverse_first_k", "two_streams", "modnn.bounds"),
    *(f"pipeline.{name}" for name in ("placement", "simulation", "orders", "ooo_pipe", "torch_csv")),
]


@pytest.mark.parametrize("name", NAMES)
def test_docstring_examples(name):
    ran = doctest.testmod(importlib.import_module(f"retime.schedules.{name}"))
    assert ran.attempted
    assert not ran.failed
