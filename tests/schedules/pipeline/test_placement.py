"""Blocks, modulo allocation and the V; sums of the first k stages; what is wrong with a schedule is said."""

import itertools
import random

import pytest

from retime.schedules import Kind, Schedule, ScheduleError, Task
from retime.schedules import pipeline as p
from retime.schedules.pipeline import Placement, StageCosts, block, modulo, v_shape


def test_chunks():
    assert block(5, 2).chunks == ((range(1, 4),), (range(4, 6),))
    assert modulo(6, 2, group=2).chunks == ((range(1, 3), range(5, 7)), (range(3, 5),))
    assert v_shape(6, 2).chunks == ((range(1, 3), range(6, 7)), (range(3, 6),))
    assert modulo(5, 2).stages_of(0) == (1, 3, 5)


@pytest.mark.parametrize("seed", range(40))
def test_no_contiguous_split_has_a_smaller_largest_block(seed):
    chance = random.Random(seed)
    stages = chance.randint(1, 9)
    ranks = chance.randint(1, stages)
    costs = [chance.choice((0, 1, 2, 3.5, 10)) for _ in range(stages)]
    largest = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, stages)))
        for cuts in itertools.combinations(range(1, stages), ranks - 1)
    )
    placement = block(stages, ranks, costs=costs)
    assert placement.ranks == ranks
    assert max(sum(costs[stage - 1] for stage in placement.stages_of(rank)) for rank in range(ranks)) == largest


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: block(2, 3), "stages=2 on ranks=3: give at least one stage a rank"),
        (lambda: block(2, 0), "ranks=0: give 1 or more"),
        (lambda: block(3, 2, costs=[1, 2]), "costs has 2 entries for 3 stages"),
        (lambda: block(2, 2, costs=[1, float("nan")]), "no duration"),
        (lambda: modulo(8, 4, group=3), "group=3: give 1 to 2"),
        (lambda: modulo(8, 4, group=0), "group=0: give 1 to 2"),
        (lambda: v_shape(7, 4), "at least 8, or use at most 3 ranks"),
        (lambda: p.even_stages([1, 1], (0, 1, 2)), "3 stages of 2 layers: give each stage at least one layer"),
        (lambda: Placement(()), "at least one stage"),
        (lambda: Placement((0, 2)), "rank 1 has no stage"),
        (lambda: Placement((-1, 0)), "rank -1: ranks count from 0"),
        (lambda: StageCosts((), (), ()), "at least one stage"),
        (lambda: StageCosts((1,), (1, 1), (1,)), "output_gradient_ms has 2 entries, forward_ms has 1"),
        (lambda: StageCosts((1,), (1,), (-1,)), "weight_gradient_ms of stage 1 is -1"),
        # Placements that a schedule cannot use.
        (lambda: p.gpipe(p.modulo(4, 2), 2), r"GPipe needs consecutive stages .*block\(\)"),
        (lambda: p.gpipe(p.block(4, 2), 0), "micro_batches=0: give 1 or more"),
        (lambda: p.one_forward_one_backward(p.v_shape(4, 2), 2), "1F1B needs consecutive stages"),
        (lambda: p.zb_h1(p.modulo(4, 2), 2), "ZB-H1 needs consecutive stages"),
        (lambda: p.interleaved(p.v_shape(4, 2), 2), r"dealt out in turn: use modulo\(\)"),
        (lambda: p.interleaved(p.modulo(4, 2), 5), "micro_batches=5 do not fill 2 rounds.*such as 4"),
        (lambda: p.interleaved_zero_bubble(p.modulo(5, 2), 2), r"use modulo\(\) with a group size that divides"),
        (lambda: p.zbv(p.modulo(4, 2), 2), r"ZBV needs two chunks a rank.*v_shape\(\)"),
        (lambda: p.zbv(p.block(2, 1), 2), "ZBV needs at least 2 ranks"),
        (lambda: p.synchronised(p.ooo_pipe2(4, 2, 2), p.modulo(4, 2), k=5), "k=5: give 0"),
        (lambda: p.ooo_pipe1(p.modulo(4, 2), 2), r"OOO-Pipe1 needs consecutive stages .* block\(\)"),
        (lambda: p.ooo_pipe2(4, 2, 2, group=5), "group=5"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()


GOOD = "rank0: F1@0 F1@1 W1@0 W1@1\nrank1: F2@0 O2@0 F2@1 O2@1 W2@0 W2@1"


def test_a_good_one_whose_tasks_are_compared_a_few_times(monkeypatch):
    p.validate_pipeline(Schedule.parse(GOOD), p.block(2, 2), 2)
    schedule, compared, equal = p.gpipe(p.block(2, 2), 50), [], Task.__eq__
    monkeypatch.setattr(Task, "__eq__", lambda one, other: compared.append(one) or equal(one, other))
    p.validate_pipeline(schedule, p.block(2, 2), 50)
    assert len(compared) < 20 * len(schedule)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("W1@1", "", "W1@1 is missing: put it on rank0"),
        ("W1@1", "W1@1 W1@1", "W1@1 is there twice"),
        ("W1@1", "W1@1 O1@1", "O1@0 is missing: put it on rank0"),
        ("F2@0 O2@0", "O2@0 F2@0", "O2@0 needs F2@0, which comes later"),
        ("O2@1 W2@0 W2@1", "W2@0 W2@1", "O2@1 is missing: put it on rank1"),
        ("W1@1", "W1@1 F2@2", "F2@2 is of no micro-batch of 0 to 1"),
        ("W1@1", "W1@1 F3@1", "F3@1 is of no stage of 1 to 2"),
        ("W1@1", "W1@1 U1", "U1 is no F, O or W"),
        ("rank1", "gpu1", "F2@0 is on no rank's lane"),
        ("F1@0 F1@1", "F1@0 F2@1", "F2@1 is of stage 2, which the placement gives to rank1"),
        ("F1@0 F1@1 W1@0", "F1@0 W1@0 F1@1", "lanes wait for each other in a circle"),
        ("\nrank1: F2@0 O2@0 F2@1 O2@1 W2@0 W2@1", "", "there is no lane rank1: give each of the 2 ranks its lane"),
    ],
)
def test_mistakes(old, new, says):
    text = GOOD.replace(old, new, 1)
    if "circle" in says:
        text = text.replace("F2@0 O2@0 F2@1 O2@1", "F2@0 F2@1 O2@0 O2@1")
    schedule, placement = Schedule.parse(text), p.block(2, 2)
    checks = [lambda: p.validate_pipeline(schedule, placement, 2)]
    if "missing" not in says and "micro-batch" not in says:
        checks.append(lambda: p.simulate_pipeline(schedule, placement, StageCosts.uniform(2)))
    for check in checks:
        with pytest.raises(ScheduleError) as caught:
            check()
        assert says in str(caught.value)
        assert "missing" in says or "no lane" in says or "<-- ERROR HERE" in str(caught.value)


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
