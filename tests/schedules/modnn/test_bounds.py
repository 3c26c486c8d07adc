"""Floors, ideal peaks and the paper's sub-batch size, worked out by hand."""

import pytest

from retime.schedules import ScheduleError
from retime.schedules.budget import Algorithm, Block, BlockKind, BudgetError, GraphTask, Phase, TaskGraph
from retime.schedules.modnn.bounds import (
    all_blocks_bytes,
    consecutive_bytes,
    ideal_peak_bytes,
    largest_feasible,
    lower_bound,
    lower_bound_offloading_weights,
    regular,
    require_floor,
    select_sub_batch,
)


def small():
    """Two layers. Bytes a sample: x 1, y1 4, y2 2, d1 4, d2 2; weights 10, gradients 10.

    Alive with b samples, beside the 20 that stay: F1 x y1, 5b + 3 workspace (fast) or none; F2 x y1 y2, 7b; L x y1 y2
    d2, 9b; B2 x y1 d2 d1, 11b; B1 x d1, 5b.
    """
    blocks = [
        Block("x", BlockKind.INPUT, 0, 1),
        Block("y1", BlockKind.ACTIVATION, 0, 4),
        Block("y2", BlockKind.ACTIVATION, 0, 2),
        Block("d1", BlockKind.GRADIENT, 0, 4),
        Block("d2", BlockKind.GRADIENT, 0, 2),
        Block("w1", BlockKind.WEIGHT, 4),
        Block("w2", BlockKind.WEIGHT, 6),
        Block("g1", BlockKind.WEIGHT_GRADIENT, 4),
        Block("g2", BlockKind.WEIGHT_GRADIENT, 6),
    ]
    f1 = (Algorithm("slow", 0, 4), Algorithm("fast", 0, 1, 3, 7))
    one = (Algorithm("only", 0, 1),)
    tasks = (
        GraphTask("F1", Phase.FORWARD, "l1", ("x", "w1"), ("y1",), f1),
        GraphTask("F2", Phase.FORWARD, "l2", ("y1", "w2"), ("y2",), one),
        GraphTask("L", Phase.FORWARD, "loss", ("y2",), ("d2",), one),
        GraphTask("B2", Phase.BACKWARD, "l2", ("d2", "y1", "w2"), ("g2", "d1"), one),
        GraphTask("B1", Phase.BACKWARD, "l1", ("d1", "x"), ("g1",), one),
        GraphTask("U", Phase.UPDATE, "all", ("w1", "w2", "g1", "g2"), ("w1", "w2"), one),
    )
    return TaskGraph({block.name: block for block in blocks}, tasks)


def test_floor_is_eq_7():
    floor = lower_bound(small())
    assert (floor.bytes, floor.resident_bytes, floor.working_bytes) == (20 + 10, 20, 10)  # B2: d2 + y1 + d1
    assert (floor.task, floor.layer, floor.workspace_bytes) == ("B2", "l2", 0)
    assert lower_bound(small(), 3).bytes == 20 + 30
    # B2 with its weight and gradient; the update of all weights at once is not counted.
    assert lower_bound_offloading_weights(small()) == 10 + 12


def test_floor_counts_the_smallest_workspace():
    graph = small()
    needy = GraphTask(
        "L", Phase.FORWARD, "loss", ("y2",), ("d2",), (Algorithm("a", 0, 1, 90), Algorithm("b", 0, 2, 70))
    )
    floor = lower_bound(TaskGraph(graph.blocks, (*graph.tasks[:2], needy, *graph.tasks[3:])))
    assert (floor.bytes, floor.layer, floor.workspace_bytes) == (20 + 4 + 70, "loss", 70)


@pytest.mark.parametrize(("samples", "fastest", "least"), [(1, 20 + 15, 20 + 11), (10, 20 + 123, 20 + 110)])
def test_ideal_peak(samples, fastest, least):
    """The fast F1 has 5b + 7b + 3, the backward of layer 2 has 11b."""
    assert ideal_peak_bytes(small(), samples) == fastest
    assert ideal_peak_bytes(small(), samples, workspace="least") == least


def test_all_blocks():
    assert all_blocks_bytes(small(), 2) == 20 + 2 * 13 + (3 + 14)


def test_eq_8_by_hand():
    """15 % of 5 tasks is one task: F1 with its fast workspace, x + y1 + 3 + 7b. 40 %: F1 F2 share y1."""
    assert consecutive_bytes(small(), 1) == 20 + 5 + 10
    assert consecutive_bytes(small(), 4) == 20 + 4 * 12 + 3
    assert consecutive_bytes(small(), 1, alpha=0.4) == 20 + (1 + 4 + 2) + 10
    assert consecutive_bytes(small(), 1, alpha=1) == 20 + 13 + 10
    # Without the workspace in the window, the widest one of two tasks is B2 B1: d2 y1 d1 x.
    assert consecutive_bytes(TaskGraph(small().blocks, _slow(small())), 1, alpha=0.4) == 20 + 12
    with pytest.raises(ScheduleError, match=r"alpha=0\b"):
        consecutive_bytes(small(), 1, alpha=0)


def _slow(graph):
    first = graph.tasks[0]
    slow = GraphTask(first.name, first.phase, first.layer, first.reads, (*first.writes, "y2"), first.algorithms[:1])
    second = graph.tasks[1]
    return (slow, GraphTask("F2", second.phase, "l2", ("y1", "y2"), ("y2",), second.algorithms), *graph.tasks[2:])


def test_sub_batch_is_the_largest_within_eq_8_made_regular():
    graph = small()
    # 23 + 12b <= budget
    assert select_sub_batch(graph, 256, 23 + 12 * 21) == 16
    assert select_sub_batch(graph, 256, 23 + 12 * 21 - 1) == 16
    assert select_sub_batch(graph, 256, 23 + 12 * 8) == 8
    assert select_sub_batch(graph, 256, 23 + 12 * 8 - 1) == 4
    assert select_sub_batch(graph, 256, 23 + 12 * 200) == 192
    assert select_sub_batch(graph, 100, 23 + 12 * 100) == 100, "a batch that fits stays whole"
    assert select_sub_batch(graph, 100, 23 + 12 * 99) == 64
    assert select_sub_batch(graph, 256, 30) == 1, "Eq. 8 asks for 35 with one sample, the floor for 30"
    with pytest.raises(ScheduleError, match="batch of 0"):
        select_sub_batch(graph, 0, 1000)


REGULAR = {1: 1, 2: 2, 3: 2, 7: 4, 15: 8, 31: 16, 32: 32, 63: 32, 64: 64, 127: 64, 200: 192, 256: 256}


@pytest.mark.parametrize(("samples", "expected"), REGULAR.items())
def test_regular(samples, expected):
    assert regular(samples) == expected


def test_largest_feasible():
    graph = small()
    assert largest_feasible(graph, 256, 20 + 10 * 7 + 9) == 7
    assert largest_feasible(graph, 5, 20 + 10 * 7) == 5


def test_refusal_says_what_would_help():
    graph = small()
    with pytest.raises(
        BudgetError, match=r"stays on the device takes 20 bytes alone .weight 10, weight gradient 10"
    ) as at:
        require_floor(graph, 1, 15)
    assert (at.value.floor_bytes, at.value.task, at.value.layer) == (30, "B2", "l2")
    with pytest.raises(BudgetError, match="with 1 sample at a time 30 bytes are enough"):
        require_floor(graph, 8, 60, splitting=False)
    with pytest.raises(BudgetError, match="make that layer or its input smaller"):
        select_sub_batch(graph, 8, 29)
    needy = GraphTask("L", Phase.FORWARD, "loss", ("y2",), ("d2",), (Algorithm("a", 0, 1, 90),))
    with pytest.raises(BudgetError, match="90 bytes are workspace of layer 'loss'"):
        require_floor(TaskGraph(graph.blocks, (*graph.tasks[:2], needy, *graph.tasks[3:])), 1, 80)
    assert require_floor(graph, 1, 30).bytes == 30
