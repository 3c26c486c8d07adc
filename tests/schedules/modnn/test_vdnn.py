"""vDNN on the same simulator: Figure 4 of moDNN, its refusals, and what Algorithm 1 does better."""

import pytest

from retime.schedules import ScheduleError
from retime.schedules.budget import Algorithm, Block, BlockKind, BudgetError, GraphTask, Phase, TaskGraph
from retime.schedules.modnn.device import Direction
from retime.schedules.modnn.offload_schedule import offload_schedule
from retime.schedules.modnn.planner import plan_vdnn
from retime.schedules.modnn.vdnn import vdnn_schedule
from support.schedules_memory import copies, judge
from support.vgg_chain import vgg_chain


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
