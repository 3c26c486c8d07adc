"""Blocks, modulo allocation and the V, with uneven splits."""

import itertools
import random

import pytest

from retime.schedules.pipeline import Placement, StageCosts, block, modulo, v_shape


def test_chunks():
    assert block(5, 2).chunks == ((range(1, 4),), (range(4, 6),))
    assert modulo(6, 2, group=2).chunks == ((range(1, 3), range(5, 7)), (range(3, 5),))
    assert v_shape(6, 2).chunks == ((range(1, 3), range(6, 7)), (range(3, 6),))
    assert modulo(5, 2).stages_of(0) == (1, 3, 5)


def test_uneven_blocks_are_balanced_by_cost():
    assert block(6, 2, costs=[5, 1, 1, 1, 1, 1]).rank_of == (0, 1, 1, 1, 1, 1)
    assert block(3, 3, costs=[1, 9, 1]).rank_of == (0, 1, 2)


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
        (lambda: Placement(()), "at least one stage"),
        (lambda: Placement((0, 2)), "rank 1 has no stage"),
        (lambda: Placement((-1, 0)), "rank -1: ranks count from 0"),
        (lambda: StageCosts((), (), ()), "at least one stage"),
        (lambda: StageCosts((1,), (1, 1), (1,)), "output_gradient_ms has 2 entries, forward_ms has 1"),
        (lambda: StageCosts((1,), (1,), (-1,)), "weight_gradient_ms of stage 1 is -1"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()
