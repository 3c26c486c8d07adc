"""The planner: the fastest of the sub-batch sizes and schedules, the paper's choice, refusals, and its own cost."""

import random
from itertools import pairwise

import pytest

from retime.schedules import ScheduleError
from retime.schedules.budget import BudgetError
from retime.schedules.modnn.bounds import ideal_peak_bytes, lower_bound, select_sub_batch
from retime.schedules.modnn.device import Device, Direction
from retime.schedules.modnn.offload_schedule import Techniques, offload_schedule
from retime.schedules.modnn.planner import _least_ms, plan_batch, plan_vdnn
from support.schedules_memory import judge, random_graph
from support.vgg_chain import vgg_chain

VGG = vgg_chain((16, 16, "M", 32, 32, "M", 64, 64, "M"), image=32, flops_per_ms=2e8)
BANDWIDTH = 5e5


def shares(graph, batch):
    floor, ideal = lower_bound(graph).bytes, ideal_peak_bytes(graph, batch)
    return [floor, *(int(floor + (ideal - floor) * share) for share in (0.02, 0.1, 0.3, 0.6, 0.9)), ideal]


def test_every_budget_from_the_floor_on_gets_a_plan_inside_it():
    times = []
    for budget in shares(VGG, 48):
        plan = plan_batch(VGG, 48, budget, BANDWIDTH)
        judge(VGG, plan.round, update=plan.rounds == 1)
        judge(VGG, plan.last)
        assert plan.peak_bytes <= budget
        assert plan.last.samples == 48 - (plan.rounds - 1) * plan.sub_batch
        times.append(plan.batch_ms)
    assert times[0] > 1.5 * times[-1]
    assert all(later <= 1.006 * earlier for earlier, later in pairwise(times))


def test_the_batch_is_its_rounds_and_one_update():
    plan = plan_batch(VGG, 48, shares(VGG, 48)[2], BANDWIDTH, search=False)
    assert plan.rounds > 1
    updates = [name for name in plan.last.start_ms if name.startswith("U(")]
    assert updates
    assert not [name for name in plan.round.start_ms if name.startswith("U(")]
    assert plan.batch_ms == pytest.approx((plan.rounds - 1) * plan.round.finish_ms + plan.last.finish_ms)
    inputs = plan.moved_bytes(Direction.INPUT)
    assert inputs == sum(VGG.blocks[name].size_bytes(48) for name in ("Y0", "label"))


def test_search_is_never_slower_than_the_paper_and_both_beat_vdnn_plus():
    for budget in shares(VGG, 48)[1:]:
        searched = plan_batch(VGG, 48, budget, BANDWIDTH)
        paper = plan_batch(VGG, 48, budget, BANDWIDTH, search=False)
        theirs = [plan_vdnn(VGG, 48, budget, BANDWIDTH, layers=how, sub_batching=True) for how in ("all", "conv")]
        assert paper.sub_batch == select_sub_batch(VGG, 48, budget)
        assert searched.batch_ms <= paper.batch_ms * 1.005
        assert searched.batch_ms < min(other.batch_ms for other in theirs)


def test_search_against_all_sub_batch_sizes():
    """Within half a percent of the best of all sizes that are powers of two or even splits."""
    for seed in range(20):
        graph, batch = random_graph(seed), 6
        floor, ideal = lower_bound(graph).bytes, ideal_peak_bytes(graph, batch)
        budget, bandwidth = (floor + ideal) // 2, random.Random(seed).choice([1.0, 10.0])
        times = []
        for size in (1, 2, 3, 4, 6):
            for how in (Techniques("gain"), Techniques("fastest")):
                if lower_bound(graph, size).bytes <= budget:
                    rounds, rest = (batch - 1) // size, (batch - 1) % size + 1
                    full = offload_schedule(graph, size, budget, bandwidth, how, update=False)
                    last = offload_schedule(graph, rest, budget, bandwidth, how)
                    times.append(rounds * full.finish_ms + last.finish_ms)
        plan = plan_batch(graph, batch, budget, bandwidth, max_simulations=100)
        assert plan.batch_ms <= min(times) * 1.0051


def test_no_schedule_beats_the_bound_by_which_the_search_stops():
    for seed in range(40):
        graph, rng = random_graph(seed), random.Random(seed)
        samples, bandwidth = rng.randint(1, 6), rng.choice([0.5, 3.0, 40.0])
        budget = lower_bound(graph, samples).bytes + rng.randint(0, 30)
        bound = _least_ms(graph, samples, samples, budget, bandwidth)
        for how in (Techniques("gain"), Techniques("fastest"), Techniques.paper()):
            assert offload_schedule(graph, samples, budget, bandwidth, how).finish_ms >= bound - 1e-9


def test_the_bound_is_close_where_transfers_decide():
    """Half of the ideal peak, over a slow link: what is beyond the budget has to leave and to come back."""
    graph = vgg_chain([16] * 12, image=16)
    resident = graph.resident_bytes(48)
    budget = resident + (ideal_peak_bytes(graph, 48) - resident) // 2
    arithmetic = offload_schedule(graph, 48, 4 * budget, BANDWIDTH).compute_ms
    for bandwidth in (BANDWIDTH / 10, BANDWIDTH / 100):
        bound = _least_ms(graph, 48, 48, budget, bandwidth)
        finish_ms = offload_schedule(graph, 48, budget, bandwidth, Techniques("gain")).finish_ms
        assert 2 * arithmetic < bound <= finish_ms < 1.2 * bound


def test_enough_memory_keeps_the_batch_whole_and_moves_nothing():
    plan = plan_batch(VGG, 48, 4 * ideal_peak_bytes(VGG, 48), BANDWIDTH)
    assert (plan.sub_batch, plan.rounds, plan.moved_bytes()) == (48, 1, 0)
    assert plan.round is plan.last


def test_equally_fast_plans_move_less():
    """At 60 % of the ideal peak the whole batch needs offloading and a half does not; both take the same time."""
    plan = plan_batch(VGG, 48, int(0.6 * ideal_peak_bytes(VGG, 48)), 1e9)
    assert plan.moved_bytes() == 0
    assert any(candidate.moved_bytes for candidate in plan.considered)
    fastest = min(candidate.batch_ms for candidate in plan.considered)
    assert plan.batch_ms <= 1.006 * fastest


def test_one_technique_at_a_time():
    """Figures 13 and 14: without sub-batches, with vDNN's transfers, with fixed algorithms."""
    budget = shares(VGG, 48)[4]
    whole = plan_batch(VGG, 48, budget, BANDWIDTH, sub_batching=False)
    assert (whole.sub_batch, whole.rounds) == (48, 1)
    assert {candidate.sub_batch for candidate in whole.considered} == {48}
    fixed = plan_batch(VGG, 48, budget, BANDWIDTH, techniques=Techniques("baseline"))
    assert set(fixed.last.algorithms.values()) == {"implicit gemm"}
    assert fixed.batch_ms > plan_batch(VGG, 48, budget, BANDWIDTH).batch_ms
    assert {candidate.techniques for candidate in fixed.considered} == {Techniques("baseline")}


def test_below_the_floor():
    floor = lower_bound(VGG)
    with pytest.raises(BudgetError, match=f"at least {floor.bytes} bytes") as raised:
        plan_batch(VGG, 48, floor.bytes - 1, BANDWIDTH)
    assert (raised.value.floor_bytes, raised.value.layer) == (floor.bytes, floor.layer)
    assert raised.value.hint
    with pytest.raises(BudgetError, match="Sub-batches would help"):
        plan_batch(VGG, 48, floor.bytes, BANDWIDTH, sub_batching=False)
    with pytest.raises(ScheduleError, match="batch of 0"):
        plan_batch(VGG, 0, floor.bytes, BANDWIDTH)


@pytest.fixture
def looked_at(monkeypatch):
    """Counts the devices simulated and all that they looked at: segments, busy stretches, blocks away."""
    devices = []
    make = Device.__init__

    def counted(device, *arguments):
        make(device, *arguments)
        devices.append(device)

    monkeypatch.setattr(Device, "__init__", counted)
    return lambda: (len(devices), sum(d.pool.steps + d.lane.steps + d.looked_at for d in devices))


def test_1500_tasks_cost_a_bounded_number_of_steps(looked_at):
    """As many tasks as ResNet-152 has in one step, at the budgets that make the most work."""
    layers = [part for width in (32, 64, 128, 256) for part in (*[width] * 93, "M")]
    graph = vgg_chain(layers, image=32, hidden=())
    tasks = len(graph.tasks)
    assert tasks >= 1500
    resident = graph.resident_bytes(1)
    budget = resident + int(0.1 * (ideal_peak_bytes(graph, 64) - resident))
    plan = plan_batch(graph, 64, budget, 2e6)
    simulations, _ = looked_at()
    assert simulations <= 2 * len(plan.considered) + 2 <= 34
    whole = plan_batch(graph, 64, budget, 2e6, sub_batching=False)
    simulations, steps = looked_at()
    assert whole.moved_bytes() > 3 * budget
    # A simulation that looked at all blocks for every task would take as many steps a task as there are blocks.
    assert steps / simulations <= 0.1 * len(graph.blocks) * tasks, steps / simulations / tasks
