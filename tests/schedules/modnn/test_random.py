"""Random graphs and budgets: what is planned could run, inside the budget, with every value where it is read."""

import random

import pytest

from retime.schedules.budget import BudgetError
from retime.schedules.modnn.bounds import ideal_peak_bytes, lower_bound
from retime.schedules.modnn.device import Direction
from retime.schedules.modnn.offload_schedule import Techniques, offload_schedule
from retime.schedules.modnn.vdnn import vdnn_schedule
from support.schedules_memory import judge, random_graph


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


def test_rounds_without_the_update():
    for seed in range(40):
        graph = random_graph(seed)
        schedule = offload_schedule(graph, 2, lower_bound(graph, 2).bytes + 3, 2.0, update=False)
        judge(graph, schedule, update=False)
        assert "U" not in schedule.start_ms


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
