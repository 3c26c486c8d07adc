"""Both gradients in one pass where nobody waits for the output gradient: never a longer step."""

import random

import pytest

from retime.schedules import Kind
from retime.schedules import pipeline as p


def joins(schedule):
    """How many weight gradients stand right in front of their output gradient."""
    return sum(
        one.kind is Kind.W and other.kind is Kind.O and (one.layer, one.micro_batch) == (other.layer, other.micro_batch)
        for lane in schedule.lanes
        for one, other in zip(lane.tasks, lane.tasks[1:], strict=False)
    )


def test_the_v_of_two_ranks_splits_where_the_other_rank_waits():
    placement, costs = p.v_shape(4, 2), p.StageCosts.uniform(4)
    order = p.zbv(placement, 4, first_output_gradient=True)
    joined = p.joined_gradients(order, placement, costs)
    assert joins(order) == 0
    assert joins(joined) == 11
    before, after = (p.simulate_pipeline(one, placement, costs).timeline for one in (order, joined))
    assert {task: ms for task, ms in after.start_ms.items() if task.kind is Kind.F} == {
        task: ms for task, ms in before.start_ms.items() if task.kind is Kind.F
    }
    assert after.makespan_ms == before.makespan_ms


def test_slow_messages_have_to_leave_at_once():
    placement, costs = p.block(2, 2), p.StageCosts.uniform(2)
    order = p.zb_h1(placement, 4, first_output_gradient=True)
    joined = p.joined_gradients(order, placement, costs)
    assert "W1@0 O1@0" in str(joined)
    assert "W2@0 O2@0" not in str(joined)  # the first rank waits for it


def test_without_output_gradients_of_the_first_stage():
    placement, costs = p.block(4, 2), p.StageCosts.uniform(4)
    order = p.zb_h1(placement, 4)
    joined = p.joined_gradients(order, placement, costs)
    ran = p.simulate_pipeline(joined, placement, costs).makespan_ms
    assert ran == p.simulate_pipeline(order, placement, costs).makespan_ms


def test_conventional_orders_stay_as_they_are():
    placement = p.block(4, 2)
    order = p.gpipe(placement, 4)
    assert p.joined_gradients(order, placement, p.StageCosts.uniform(4)) == order


@pytest.mark.parametrize("seed", range(20))
def test_no_step_is_longer(seed):
    chance = random.Random(seed)
    ranks, batches = chance.choice((2, 4)), 4
    stages = ranks * chance.choice((2, 3))
    placement = p.modulo(stages, ranks)
    costs = p.StageCosts(*(tuple(chance.choice((1.0, 2.0, 3.0)) for _ in range(stages)) for _ in range(3)))
    hops = chance.choice((0.0, 0.5, 2.0))
    for order in (
        p.fastest_list_schedule(placement, batches, costs, hops=hops, first_output_gradient=True),
        p.interleaved_zero_bubble(placement, batches, first_output_gradient=True),
    ):
        joined = p.joined_gradients(order, placement, costs, hops=hops)
        before, after = (p.simulate_pipeline(one, placement, costs, hops=hops) for one in (order, joined))
        assert after.makespan_ms <= before.makespan_ms
        assert after.peak_bytes <= before.peak_bytes
        assert [sorted(map(str, lane.tasks)) for lane in joined.lanes] == [
            sorted(map(str, lane.tasks)) for lane in order.lanes
        ]
