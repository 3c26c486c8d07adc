"""The planner's choice of sub-batch sizes and schedules, random graphs and budgets, and vDNN on the same simulator."""

import random
from itertools import pairwise

import pytest

from retime.schedules import ScheduleError
from retime.schedules.budget import Algorithm, Block, BlockKind, BudgetError, GraphTask, Phase, TaskGraph
from retime.schedules.modnn.bounds import ideal_peak_bytes, lower_bound, select_sub_batch
from retime.schedules.modnn.device import Device, Direction
from retime.schedules.modnn.offload_schedule import Techniques, offload_schedule
from retime.schedules.modnn.planner import _least_ms, plan_batch, plan_vdnn
from retime.schedules.modnn.vdnn import vdnn_schedule
from support.schedules_memory import copies, judge, random_graph
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


def budgets(graph, samples):
    """The floor, a few steps towards the ideal peak, and that."""
    floor, ideal = lower_bound(graph, samples).bytes, ideal_peak_bytes(graph, samples)
    return sorted({floor, *(floor + round((ideal - floor) * share) for share in (0.2, 0.5, 0.8, 1.0, 2.0))})


@pytest.mark.parametrize("algorithms", ["gain", "fastest", "baseline"])
@pytest.mark.parametrize("spare_unused", [True, pytest.param(False, marks=pytest.mark.long)])
def test_algorithm_1_never_breaks_the_rules(algorithms, spare_unused):
    runs = moved = defragmented = 0
    for seed in range(60):
        graph, rng = random_graph(seed), random.Random(seed)
        samples, bandwidth = rng.randint(1, 5), rng.choice([0.5, 3.0, 40.0])
        for budget in budgets(graph, samples):
            if algorithms == "baseline":
                budget += 12  # the baseline may need more workspace than the smallest, which the floor counts
            techniques = Techniques(algorithms, rng.random() < 0.5, spare_unused)
            schedule = offload_schedule(graph, samples, budget, bandwidth, techniques)
            judge(graph, schedule)
            runs += 1
            moved += schedule.moved_bytes(Direction.OFFLOAD) > 0
            defragmented += bool(schedule.defragmentations)
    assert runs > 200
    assert moved > runs / 10, "budgets too generous to test anything"
    assert defragmented


@pytest.mark.parametrize("layers", ["all", "conv"])
def test_vdnn_never_breaks_the_rules(layers):
    fitting = refused = moved = 0
    for seed in range(60):
        graph = random_graph(seed)
        for budget in budgets(graph, 3):
            try:
                schedule = vdnn_schedule(graph, 3, budget, 4.0, layers=layers)
            except BudgetError:
                refused += 1
                continue
            judge(graph, schedule)
            fitting += 1
            moved += schedule.moved_bytes(Direction.OFFLOAD) > 0
    assert fitting > 50
    assert refused > 50
    assert moved > 20


def test_below_the_floor_is_refused():
    for seed in range(20):
        graph = random_graph(seed)
        floor = lower_bound(graph, 2).bytes
        with pytest.raises(BudgetError, match=f"at least {floor} bytes") as raised:
            offload_schedule(graph, 2, floor - 1, 1.0)
        assert raised.value.floor_bytes == floor
        assert raised.value.task


def test_enough_memory_moves_nothing_but_inputs():
    for seed in range(40):
        graph = random_graph(seed)
        schedule = offload_schedule(graph, 2, 1 << 20, 1.0)
        assert schedule.moved_bytes(Direction.OFFLOAD, Direction.PREFETCH) == 0
        assert schedule.moved_bytes() == graph.blocks["x"].size_bytes(2)
        assert not schedule.defragmentations


def three_layers(names=("conv1", "pool2", "conv3")):
    """Forward and backward of three layers, 4 bytes each; forward tasks take 2 ms, backward tasks 3 ms."""
    blocks = {"y0": Block("y0", BlockKind.INPUT, 1)}
    forward, backward = [], []
    for number, name in enumerate(names, start=1):
        for letter, kind in (("y", BlockKind.ACTIVATION), ("d", BlockKind.GRADIENT)):
            blocks[f"{letter}{number}"] = Block(f"{letter}{number}", kind, 4)
        below, above, delta = f"y{number - 1}", f"y{number}", f"d{number}"
        forward.append(GraphTask(f"F {name}", Phase.FORWARD, name, (below,), (above,), (Algorithm("only", 2),)))
        writes = (f"d{number - 1}",) if number > 1 else ()
        backward.append(GraphTask(f"B {name}", Phase.BACKWARD, name, (below, delta), writes, (Algorithm("only", 3),)))
    last = len(names)
    loss = GraphTask("loss", Phase.FORWARD, "loss", (f"y{last}",), (f"d{last}",), (Algorithm("only", 2),))
    return TaskGraph(blocks, (*forward, loss, *reversed(backward)))


def test_figure_4_each_copy_overlaps_with_one_task_and_the_next_waits_for_both():
    """compute   F1  F2      F3      L   B3      B2  B1
    transfer         y1----  y2----      y1..          (y2, which B3 needs, comes while L runs)
    """
    graph = three_layers()
    schedule = vdnn_schedule(graph, 1, 100, 1.0)
    judge(graph, schedule)
    assert copies(schedule) == [
        ("input", "y0", 0, 1),
        ("offload", "y1", 3, 7),  # F2 reads it, from 3 to 5; F3 waits until 7
        ("offload", "y2", 7, 11),
        ("prefetch", "y2", 11, 15),  # while the loss runs, from 11 to 13
        ("prefetch", "y1", 15, 19),  # while B3 runs, from 15 to 18
        ("prefetch", "y0", 19, 20),
    ]
    assert list(schedule.start_ms.values()) == [1, 3, 7, 11, 15, 19, 22]
    assert schedule.finish_ms == 25


def test_conv_offloads_what_convolutions_read():
    """y1 is read by the pooling alone, so it stays; the input of conv1 comes back for its backward task."""
    schedule = vdnn_schedule(three_layers(), 1, 100, 1.0, layers="conv")
    assert schedule.offloaded == ("y2",)
    everything = vdnn_schedule(three_layers(("conv1", "conv2", "conv3")), 1, 100, 1.0, layers="conv")
    assert everything.offloaded == ("y1", "y2")


def test_a_prefetch_looks_no_further_than_the_next_convolution():
    """With conv2, y1 is fetched while B3 runs: B2 is the next convolution. Without any, the search goes on."""
    for names in (("conv1", "conv2", "conv3"), ("fc1", "fc2", "fc3")):
        schedule = vdnn_schedule(three_layers(names), 1, 100, 1.0)
        fetched = [entry for entry in copies(schedule) if entry[0] == "prefetch"]
        assert [entry[1] for entry in fetched] == ["y2", "y1", "y0"]


def test_necessary_synchronisations_only_are_faster():
    """The same graph and budget by Algorithm 1: one copy may pass several tasks."""
    graph = three_layers()
    theirs = vdnn_schedule(graph, 1, 17, 1.0)
    ours = offload_schedule(graph, 1, 17, 1.0)
    assert ours.finish_ms < theirs.finish_ms
    assert ours.moved_bytes(Direction.OFFLOAD) < theirs.moved_bytes(Direction.OFFLOAD)


def test_fastest_algorithm_for_which_there_is_memory():
    graph = three_layers()
    options = (Algorithm("base", 9), Algorithm("fast", 5, 0, 8), Algorithm("fastest", 1, 0, 1000))
    first = GraphTask("F conv1", Phase.FORWARD, "conv1", ("y0",), ("y1",), options)
    graph = TaskGraph(graph.blocks, (first, *graph.tasks[1:]))
    assert vdnn_schedule(graph, 1, 100, 1.0).algorithms == {"F conv1": "fast"}
    assert vdnn_schedule(graph, 1, 2000, 1.0).algorithms == {"F conv1": "fastest"}
    assert vdnn_schedule(graph, 1, 2000, 1.0, algorithms="baseline").algorithms == {"F conv1": "base"}


def test_refusal_names_the_bytes_and_they_are_enough():
    graph = three_layers()
    with pytest.raises(BudgetError, match=r"too small for vDNN \(all\).*found no 4 bytes in one piece") as raised:
        vdnn_schedule(graph, 1, 10, 1.0)
    enough = raised.value.floor_bytes
    assert vdnn_schedule(graph, 1, enough, 1.0).peak_bytes <= enough
    with pytest.raises(BudgetError, match="sub-batches"):
        vdnn_schedule(graph, 1, 3, 1.0)


def test_vdnn_plus_takes_the_papers_sub_batch_size():
    graph = vgg_chain((16, 16, "M", 32, "M"), image=16)
    budget = graph.resident_bytes(1) + 1_000_000
    with pytest.raises(BudgetError):
        plan_vdnn(graph, 64, budget, 1e6)
    plan = plan_vdnn(graph, 64, budget, 1e6, sub_batching=True)
    assert 1 < plan.sub_batch < 64
    assert plan.rounds * plan.sub_batch >= 64
    assert plan.peak_bytes <= budget
    judge(graph, plan.round, update=False)
    judge(graph, plan.last)


def test_wrong_arguments():
    with pytest.raises(ScheduleError, match="'all' or 'conv'"):
        vdnn_schedule(three_layers(), 1, 100, 1.0, layers="some")
    with pytest.raises(ScheduleError, match="'fastest' or 'baseline'"):
        vdnn_schedule(three_layers(), 1, 100, 1.0, algorithms="gain")
    with pytest.raises(ScheduleError, match="bandwidth"):
        vdnn_schedule(three_layers(), 1, 100, -1.0)
