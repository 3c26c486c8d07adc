"""Algorithm 1 by hand, its rule for memory, plans as text, and what the validator says."""

import pytest

from retime.schedules import (
    Profile,
    Region,
    ScheduleError,
    Task,
    TwoStreamSchedule,
    backward_and_forward_regions,
    joint_schedule,
    joint_schedule_within,
    one_stream,
    profiled_timeline,
    sub_stream_tasks,
    two_stream_buffers,
    validate_two_streams,
)

REGIONS = backward_and_forward_regions([[1, 2], [3, 4]])
MAIN_MS = {task: {"O": 2.0, "F": 2.0, "W": 1.0, "U": 0.0}[task.kind] for region in REGIONS for task in region.tasks}
W2, W3, W4 = map(Task.parse, ("W2", "W3", "W4"))


def profile(speedup, sub_ms=2.0):
    times = sub_ms if isinstance(sub_ms, dict) else dict.fromkeys((W4, W3, W2), [sub_ms] * 4)
    return Profile(MAIN_MS, times, dict(zip((W4, W3, W2), speedup, strict=True)))


FLAT = [[1.0] * 4] * 3
RISING = [[1.1, 1.2, 1.5, 1.9], [1.1, 1.3, 1.4, 1.0], [1.0, 1.2, 1.3, 1.0]]


def plan_of(*sub):
    lines = [f"{region.name}: {' '.join(map(str, region.tasks))}" for region in REGIONS]
    return "\n".join(f"{line} | {tasks}" if tasks else line for line, tasks in zip(lines, sub, strict=True))


def test_the_main_stream_is_the_critical_path_and_the_first_layer():
    assert plan_of("", "", "", "") == "R1: O4 O3\nR2: O2 W1 U1\nR3: F1' F2'\nR4: F3' F4'"
    assert str(one_stream(REGIONS)) == "R1: W4 O4 U4 W3 O3 U3\nR2: W2 O2 U2 W1 U1\nR3: F1' F2'\nR4: F3' F4'"
    validate_two_streams(one_stream(REGIONS))


def test_schedulable_intervals():
    placed = [(str(t.task), t.first, t.ready_ms, t.last, t.due_ms) for t in sub_stream_tasks(REGIONS, MAIN_MS)]
    assert placed == [("W4", 0, 0.0, 3, 2.0), ("W3", 0, 2.0, 3, 0.0), ("W2", 0, 4.0, 2, 2.0)]
    assert [str(t.task) for t in sub_stream_tasks(REGIONS, MAIN_MS, without_weights={3})] == ["W4", "W2"]


def test_algorithm_1_takes_the_pair_of_highest_speedup_and_removes_full_regions():
    """Worked by hand, a round each.

    1. W4 beside R3 (1.5): beside R4 (1.9) it would end at 2.5 ms, and F4' is due at 2 ms. now[3] = 2.
    2. W3 beside R3 (1.4): now[3] = 4 = T_main, so R3 is removed.
    3. W2 beside R2 (1.2): R1 has it ready at 4 ms only.
    """
    late = {W4: [2.0, 2.0, 2.0, 2.5], W3: [2.0] * 4, W2: [2.0] * 4}
    plan = joint_schedule(REGIONS, profile(RISING, late))
    assert str(plan) == plan_of("", "W2 U2", "W4 U4 W3 U3", "")
    validate_two_streams(plan)
    fits = joint_schedule(REGIONS, profile(RISING))
    assert str(fits) == plan_of("", "W2 U2", "W3 U3", "W4 U4")  # 2 ms do end in time


def test_ties_go_to_the_earliest_region_and_the_highest_layer():
    """W4 beside R1 at 0 ms; then now[1] = 2, so W3 is runnable there; R1 is full, W2 goes beside R2."""
    assert str(joint_schedule(REGIONS, profile(FLAT), updates=False)) == plan_of("W4 W3", "W2", "", "")


def test_updates_wait_for_the_output_gradient_that_reads_the_weights():
    assert str(joint_schedule(REGIONS, profile(FLAT))) == plan_of("W4 W3 U4 U3", "W2 U2", "", "")


@pytest.mark.parametrize("sub_ms", [0.5, 9.0])
def test_clocks_wait_and_full_regions_open_again(sub_ms):
    """Beside the forward pass each takes too long. W3 is ready at 2 ms, and W4 beside R1 has ended long before; or one
    weight gradient fills R1, and the two that are left have no other region."""
    regions = backward_and_forward_regions([[1, 2, 3, 4]])
    times, speedup = (dict.fromkeys((W4, W3, W2), value) for value in ([sub_ms, 9.0], [1.0, 1.0]))
    plan = joint_schedule(regions, Profile(MAIN_MS, times, speedup), updates=False)
    assert str(plan) == "R1: O4 O3 O2 W1 U1 | W4 W3 W2\nR2: F1' F2' F3' F4'"


@pytest.mark.parametrize("k", range(5))
def test_prescheduled_regions_run_weight_gradients_once_ready(k):
    plan = joint_schedule(REGIONS, profile(RISING), prescheduled=k, updates=False)
    validate_two_streams(plan)
    expected = plan_of("", "W2", "W3", "W4") if k == 0 else plan_of("W4 W3 W2", "", "", "")
    assert str(plan) == expected


def test_clocks_and_memory_by_hand():
    """Kept: Y1 to Y3 (1 byte each) until O and W have read them, dY (10 bytes) until O and W below have."""
    plan = joint_schedule(REGIONS, profile(RISING), updates=False)
    buffers = two_stream_buffers(plan.schedule, activation_bytes={1: 1, 2: 1, 3: 1}, output_gradient_bytes=10)
    ran = profiled_timeline(plan, profile(RISING), buffers)
    assert ran.makespan_ms == 15.0  # 4 + 3 + 4 + 4: nothing waits
    starts = {str(task): ran.start_ms[task] for task in (W2, W3, W4)}
    assert starts == {"W2": 4.0, "W3": 7.0, "W4": 11.0}
    # at 4 ms dY4, dY3 and dY2 are alive for W3, W2 and W1; Y3 for W4, Y2 for W3, Y1 for W2
    assert (ran.peak_bytes, ran.peak_ms) == (33, 4.0)
    early = joint_schedule(REGIONS, profile(RISING), prescheduled=4, updates=False)
    assert profiled_timeline(early, profile(RISING), buffers).peak_bytes == 22


def test_the_rule_for_memory_preschedules_until_it_fits():
    plain = joint_schedule(REGIONS, profile(RISING))
    buffers = two_stream_buffers(plain.schedule, activation_bytes={1: 1, 2: 1, 3: 1}, output_gradient_bytes=10)
    assert joint_schedule_within(33, REGIONS, profile(RISING), buffers) == plain
    early = joint_schedule(REGIONS, profile(RISING), prescheduled=1)
    assert joint_schedule_within(32, REGIONS, profile(RISING), buffers) == early
    least = profiled_timeline(early, profile(RISING), buffers).peak_bytes
    with pytest.raises(ScheduleError, match=rf"max_bytes=1: the step takes at least {least} bytes.*in 1 of 1 regions"):
        joint_schedule_within(1, REGIONS, profile(RISING), buffers)


def test_the_next_forward_pass_keeps_what_it_makes():
    plan = one_stream(REGIONS)
    sizes = {1: 1, 2: 2, 3: 4, 4: 8}
    buffers = two_stream_buffers(plan.schedule, activation_bytes=sizes, other_activation_bytes=16)
    memory = profiled_timeline(plan, Profile(dict.fromkeys(plan.schedule, 1.0), {}, {}), buffers).memory
    assert memory[0] == (0.0, 1 + 2 + 4 + 8 + 3 * 16)
    assert memory[-1][1] == 0  # at the end all go


def test_plans_print_and_parse():
    for plan in (joint_schedule(REGIONS, profile(RISING)), one_stream(REGIONS), TwoStreamSchedule((), ())):
        assert TwoStreamSchedule.parse(str(plan)) == plan
    assert TwoStreamSchedule.parse("  R1 :O3 O2|W3 ") == TwoStreamSchedule.parse("R1: O3 O2 | W3\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("O3 O2", "cannot read line 'O3 O2': a region is a name, a colon"),
        ("R1: O3 | W3 | W2", "cannot read line"),
        ("R1: O3 | X3", "cannot read task 'X3'"),
        ("R1: | W3", "region R1 has no main-stream task"),
        (": O3", "region name ''"),
        ("R1: O3\nR1: O2", "region R1 is given 2 times"),
    ],
)
def test_text_that_is_no_plan(text, message):
    with pytest.raises(ScheduleError, match=message):
        TwoStreamSchedule.parse(text)


@pytest.mark.parametrize(
    ("sub", "message"),
    [
        (("W4 W3", "", "", "W2"), r"F2' of R3 needs W2: move W2 to R3 or earlier\n  R4: \| W2\n"),
        (("W4 W3 U2", "W2", "", ""), r"U2 needs O2, which runs in R2: move U2 to R2 or later"),
        (("W4 O3", "W2", "", ""), "O3 is on the sub-stream, which has W and U"),
        (("W4 W4 W3", "W2", "", ""), "W4 is there twice: leave one out"),
        (("W4", "W2", "", ""), "W3 is missing, and F3' needs it: put it beside R1 or a region up to R4"),
        (("W4 W3 U3 U4", "U2 W2", "", ""), "U2 needs W2, which comes later"),
        (("W4 W3", "", "W2", "U4"), None),
    ],
)
def test_the_validator_names_what_breaks(sub, message):
    plan = TwoStreamSchedule.parse(plan_of(*sub))
    if message is None:
        validate_two_streams(plan)
        return
    with pytest.raises(ScheduleError, match=message):
        validate_two_streams(plan)


def test_layers_without_parameters_need_no_weight_gradient():
    plan = TwoStreamSchedule.parse(plan_of("W4", "W2", "", ""))
    validate_two_streams(plan, without_weights={3})


def test_what_planners_refuse():
    with pytest.raises(ScheduleError, match=r"blocks hold the layers \[1, 3\]"):
        backward_and_forward_regions([[1], [3]])
    with pytest.raises(ScheduleError, match="region name 'R 1'"):
        Region("R 1", (W2,))
    with pytest.raises(ScheduleError, match="4 regions have 1 lists"):
        TwoStreamSchedule(REGIONS, ((),))
    with pytest.raises(ValueError, match=r"prescheduled=5: give 0 \(none\) to 4"):
        joint_schedule(REGIONS, profile(FLAT), prescheduled=5)
    with pytest.raises(ScheduleError, match="speedup has no 4 values for W4"):
        joint_schedule(REGIONS, Profile(MAIN_MS, dict.fromkeys((W4, W3, W2), [1.0] * 4), {}))
    with pytest.raises(ScheduleError, match="main_ms has no duration for O4 of region R1"):
        sub_stream_tasks(REGIONS, {})
    with pytest.raises(ScheduleError, match="main_ms has no duration for O4: add it"):
        profiled_timeline(one_stream(REGIONS), Profile({W4: 1.0}, {}, {}))
    with pytest.raises(ScheduleError, match=r"sub_ms has no 4 values for W\d: give one a region"):
        profiled_timeline(joint_schedule(REGIONS, profile(RISING)), Profile(MAIN_MS, {W4: [1.0]}, {}))
    with pytest.raises(ScheduleError, match="O4 is in no region, and W3 cannot be placed"):
        sub_stream_tasks(REGIONS[1:], MAIN_MS)
    joined = Region("R", tuple(task for region in REGIONS for task in region.tasks))
    with pytest.raises(ScheduleError, match="region R makes W4 ready and has F4': cut it"):
        sub_stream_tasks((joined,), MAIN_MS)
