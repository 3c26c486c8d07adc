"""Section 6: the first k stages' weight gradients in reverse, for the data-parallel sums of the stages."""

import pytest

from retime.schedules import Kind, Task
from retime.schedules import pipeline as p


def test_every_stage_is_summed_once_behind_its_last_weight_gradient():
    placement, plain = p.modulo(8, 2), p.ooo_pipe2(8, 2, 2)
    for k in range(9):
        schedule = p.synchronised(plain, placement, k=k)
        p.validate_pipeline(schedule, placement, 2)
        assert sorted(task.layer for task in schedule if task.kind is Kind.S) == list(range(1, 9))
    assert p.synchronised(plain, placement).lanes[:2] == plain.lanes


def test_stage_1_is_summed_first_of_the_first_k():
    placement = p.block(4, 2)
    costs = p.StageCosts.uniform(4)
    plain = p.ooo_pipe2(4, 2, 2, group=2, rule=p.GREEDY)
    ends = []
    for k in (0, 2):
        ran = p.simulate_pipeline(
            p.synchronised(plain, placement, k=k), placement, costs, synchronisation_ms=lambda _: 4
        )
        ends.append(ran.timeline.end_ms[Task(Kind.S, 1)])
    assert ends[1] < ends[0]


def test_k_out_of_range():
    with pytest.raises(ValueError, match="k=5: give 0"):
        p.synchronised(p.ooo_pipe2(4, 2, 2), p.modulo(4, 2), k=5)
