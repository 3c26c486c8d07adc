"""Two streams on one device, to the thread block: times, places, what a region gains, and a processor's cores."""

import random

import pytest

from retime.schedules import (
    Device,
    Kernel,
    Kind,
    ScheduleError,
    Task,
    TwoStreamSchedule,
    backward_and_forward_regions,
    joint_schedule,
    one_stream,
    picture,
    profile_regions,
    simulate_two_streams,
    two_stream_buffers,
    validate_two_streams,
)

CAPACITY = 1520
"""Thread blocks that a V100 runs at once, and 448 is what half of DenseBlock-4's weight gradients have: section 2."""


def run(plan, kernels, device):
    """`kernels` by a task's text: a list of (thread blocks, ms each)."""
    plan = TwoStreamSchedule.parse(plan)
    of = {task: [Kernel(*kernel) for kernel in kernels.get(str(task), ())] for task in plan.schedule}
    return simulate_two_streams(plan, of, device)


def test_a_main_stream_that_fills_the_device_leaves_the_sum_of_times():
    full, half = [(4, 1.0), (8, 1.0)], [(2, 2.0)]
    ran = run("R1: O4 O3 | W4 W3", {"O4": full, "O3": full, "W4": half, "W3": half}, Device(4))
    assert ran.makespan_ms == ran.sequential_ms == 10.0
    assert ran.occupancy[0] == (0.0, 4, 0)
    assert ran.idle_share == pytest.approx(0.2)  # half of the device in the sub-stream's 4 of 10 ms
    assert [region.speedup for region in ran.regions] == [1.0]
    assert picture(ran.timeline.spans, characters_per_ms=2) == "main  |O4   |O3   |\nsub   |W4             |W3 |"


def test_a_full_main_stream_gains_the_time_of_setting_up_kernels():
    """R2 of Figure 8: where O has as many thread blocks as the device, only the kernel execution overhead is gained."""
    main, sub = {"O4": [(CAPACITY, 1.0)] * 4}, {"W4": [(CAPACITY, 0.0625)] * 3}
    ran = run("R1: O4 | W4", main | sub, Device(CAPACITY, setup_ms=0.0625))
    assert ran.makespan_ms == 4 * 1.0625  # each W fills the 0.0625 ms between two kernels
    assert ran.sequential_ms == 4 * 1.0625 + 3 * 0.125


def test_tail_underutilization_is_what_the_sub_stream_gets():
    """R5 of Figure 8: 448 thread blocks of W fit beside the last wave of a kernel of many."""
    ran = run("R1: O4 | W4", {"O4": [(3 * CAPACITY - 448, 1.0)], "W4": [(448, 1.0)]}, Device(CAPACITY))
    assert (ran.makespan_ms, ran.sequential_ms, ran.idle_share) == (3.0, 4.0, 0.0)
    assert ran.occupancy == ((0.0, CAPACITY, 0), (2.0, CAPACITY - 448, 448), (3.0, 0, 0))
    assert ran.regions[0].speedup == 4 / 3


def test_free_places_go_to_the_main_stream_and_running_blocks_are_not_interrupted():
    """W4 starts beside O4 on 2 of 4 places for 3 ms. O3 wants 4 at 1 ms, gets 2, and the others at 3 ms, before W3."""
    kernels = {"O4": [(2, 1.0)], "O3": [(4, 4.0)], "W4": [(2, 3.0)], "W3": [(1, 1.0)]}
    ran = run("R1: O4 O3 | W4 W3", kernels, Device(4))
    assert ran.occupancy == ((0.0, 2, 2), (3.0, 4, 0), (5.0, 2, 1), (6.0, 2, 0), (7.0, 0, 0))


def test_a_stream_waits_for_needs_and_for_its_region():
    """W4 is beside R2 and starts with it, though its output gradient is there; U3 waits for O3, F3' for U3."""
    kernels = {"O4": [(1, 2.0)], "O3": [(1, 1.0)], "W4": [(1, 1.0)], "W3": [(1, 4.0)], "F3'": [(1, 1.0)]}
    ran = run("R1: O4\nR2: O3 | W4 W3 U3\nR3: F3'", kernels, Device(4))
    assert {str(task): ms for task, ms in ran.timeline.start_ms.items()} == {
        **{"O4": 0.0, "O3": 2.0, "W4": 2.0, "W3": 3.0},
        **{"U3": 7.0, "F3'": 7.0},
    }
    assert ran.timeline.idle_ms == {"main": 4.0, "sub": 3.0}
    assert [(r.start_ms, r.end_ms, r.speedup) for r in ran.regions] == [(0, 2, 1.0), (2, 7, 6 / 5), (7, 8, 1.0)]


def test_issuing_kernels_takes_time_until_they_are_compiled_before():
    """Figure 2: issue is ahead of long kernels, and the device waits for short ones."""
    kernels = {"F1'": [(4, 8.0)], "F2'": [(4, 1.0)] * 10}
    issued = run("R1: F1' F2'", kernels, Device(4, issue_ms=2.0))
    compiled = run("R1: F1' F2'", kernels, Device(4))
    # F1' runs from 2 to 10 ms; then six short ones run at once, the others as issued at 18, 20 and 22 ms
    assert (issued.makespan_ms, compiled.makespan_ms) == (23.0, 18.0)
    pairs = zip(issued.occupancy, issued.occupancy[1:], strict=False)
    waits = [after[0] - before[0] for before, after in pairs if not before[1]]
    assert waits == [1.0, 1.0, 1.0]
    assert run("R1: F2'", kernels, Device(4, issue_ms=2.0)).makespan_ms == 21.0


def test_cores_of_a_processor():
    """A place is a core: two streams with a core each, or the main-stream with both."""
    kernels = {"O4": [(2, 3.0)], "W4": [(2, 2.0)]}
    each = run("R1: O4 | W4", kernels, Device(2, main=1, sub=1))
    assert (each.timeline.end_ms[Task(Kind.O, 4)], each.timeline.end_ms[Task(Kind.W, 4)]) == (6.0, 4.0)
    both = run("R1: W4 O4", kernels, Device(2))
    assert (both.makespan_ms, both.idle_share) == (5.0, 0.0)  # layers that scale to two cores need no second stream
    serial = {"O4": [(1, 3.0)], "W4": [(1, 2.0)]}
    assert run("R1: O4 | W4", serial, Device(2, main=1, sub=1)).makespan_ms == 3.0
    assert run("R1: W4 O4", serial, Device(2)).makespan_ms == 5.0  # layers that do not, gain all of W


def test_profile_of_pairs():
    """Beside R1's full kernels both W run alone; beside R2's half-filled ones W3 and W4 are hidden."""
    regions = backward_and_forward_regions([[1, 2], [3, 4]])
    blocks = {"O4": 4, "O3": 4, "O2": 2, "W4": 2, "W3": 2, "W2": 2}
    kernels = {task: [] for region in regions for task in region.tasks}
    kernels |= {Task.parse(text): [Kernel(count, 1.0)] for text, count in blocks.items()}
    profile = profile_regions(regions, kernels, Device(4, issue_ms=100.0))
    assert [profile.main_ms[Task.parse(text)] for text in ("O4", "O2", "W1")] == [1.0, 1.0, 0.0]
    assert profile.speedup[Task.parse("W4")] == profile.speedup[Task.parse("W3")] == [1.0, 1.5, 1.0, 1.0]
    assert profile.sub_ms[Task.parse("W4")] == [3.0, 1.0, 1.0, 1.0]  # beside R1 it waits 2 ms for places
    assert profile.speedup[Task.parse("W2")] == [1.0, 2.0, 1.0, 1.0]
    plan = joint_schedule(regions, profile)
    # W2 fills R2, which has the highest speedup of all; 1.0 is left for the others, the earliest region first
    assert str(plan).splitlines()[:2] == ["R1: O4 O3 | W4 U4", "R2: O2 W1 U1 | W2 U2"]


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_keep_the_bounds(seed):
    """All work is done in order, within the device, no faster than its places allow; regions add up."""
    draw = random.Random(seed)
    layers = draw.randint(3, 9)
    cut = draw.randint(1, layers - 1)
    regions = backward_and_forward_regions([range(1, cut + 1), range(cut + 1, layers + 1)])
    device = Device(draw.randint(2, 9), setup_ms=draw.choice((0.0, 0.25)))

    def some():
        return [Kernel(draw.randint(1, 20), draw.randint(1, 8) / 8) for _ in range(draw.randint(1, 3))]

    kernels = {task: some() for task in one_stream(regions).schedule}
    profile = profile_regions(regions, kernels, device)
    for prescheduled in (0, 1, 4):
        plan = joint_schedule(regions, profile, prescheduled=prescheduled)
        validate_two_streams(plan)
        assert TwoStreamSchedule.parse(str(plan)) == plan
        buffers = two_stream_buffers(plan.schedule, activation_bytes=1, output_gradient_bytes=1)
        ran = simulate_two_streams(plan, kernels, device, buffers=buffers)
        work_ms = sum(kernel.thread_blocks * kernel.block_ms for its in kernels.values() for kernel in its)
        assert ran.makespan_ms >= work_ms / device.capacity - 1e-9
        assert ran.idle_share == pytest.approx(1 - work_ms / device.capacity / ran.makespan_ms)
        assert max(main + sub for _, main, sub in ran.occupancy) <= device.capacity
        assert sum(region.sequential_ms for region in ran.regions) == pytest.approx(ran.sequential_ms)
        for lane in plan.schedule.lanes:  # section 4.1's constraint: a stream runs one task at a time
            for before, task in zip(lane.tasks, lane.tasks[1:], strict=False):
                assert ran.timeline.start_ms[task] >= ran.timeline.end_ms[before]
        assert ran.timeline.peak_bytes > 0
    alone = simulate_two_streams(one_stream(regions), kernels, device)
    assert alone.makespan_ms == pytest.approx(alone.sequential_ms)


def test_what_is_refused():
    with pytest.raises(ValueError, match="thread_blocks=0: give 1 or more"):
        Kernel(0, 1.0)
    with pytest.raises(ValueError, match=r"block_ms=-1\.0: give 0 or more milliseconds"):
        Kernel(1, -1.0)
    with pytest.raises(ValueError, match="sub=3: give at most capacity=2"):
        Device(2, sub=3)
    with pytest.raises(ValueError, match=r"main=0: give 1 or more, or None for the capacity"):
        Device(2, main=0)
    with pytest.raises(ScheduleError, match="kernels has none for O4"):
        simulate_two_streams(TwoStreamSchedule.parse("R1: O4"), {}, Device(2))
    with pytest.raises(ScheduleError, match="O3 needs O4, which is missing"):
        run("R1: O5 O3 | W5 W3", {}, Device(2))
