"""Figures 1, 2, 8 and 9 on counted networks: what holds, and what the paper measured and counts do not give.

DenseNet-121 with k=32 at batch 32 on images of 224, unless said otherwise: the figures do not name k and batch.
"""

import functools

import pytest

from retime.recipes.ooo.counted_networks import (
    CAPACITY,
    SETUP_MS,
    counted_network,
    issue_ratios,
    issue_waits_ms,
    memory_by_layer,
    placed_as_figure_8,
)
from retime.schedules import (
    Kind,
    Task,
    joint_schedule,
    joint_schedule_within,
    one_stream,
    profile_regions,
    simulate_two_streams,
    validate_two_streams,
)

DENSENET, NARROW = "DenseNet-121 (k=32)", "DenseNet-121 (k=12)"
network = functools.cache(counted_network)


@functools.cache
def profile(name, batch_size=32):
    counted = network(name, batch_size)
    return profile_regions(counted.regions, counted.kernels, counted.device())


@functools.cache
def ran(name, how, batch_size=32):
    """One stream, two with weight gradients once ready, Algorithm 1, or the placement that Figure 8 shows."""
    counted = network(name, batch_size)
    plan = {
        "one": lambda: one_stream(counted.regions),
        "ready": lambda: joint_schedule(counted.regions, profile(name, batch_size), prescheduled=len(counted.regions)),
        "joint": lambda: joint_schedule(counted.regions, profile(name, batch_size)),
        "figure 8": lambda: placed_as_figure_8(counted),
    }[how]()
    validate_two_streams(plan)
    return simulate_two_streams(plan, counted.kernels, counted.device(), buffers=counted.buffers())


def speed(name, how, batch_size=32):
    return ran(name, "one", batch_size).makespan_ms / ran(name, how, batch_size).makespan_ms


def pair(block, region):
    """The speedup of a dense block's weight gradients beside a region, both from 1."""
    layer = network(DENSENET, 32).blocks[block - 1][-1]
    return profile(DENSENET).speedup[Task(Kind.W, layer)][region - 1]


def test_layers_and_dense_blocks():
    """The stem goes to block 1, transitions to the block before, the classifier to block 4: eight regions."""
    counted = network(DENSENET, 32)
    assert len(counted.layers) == 121
    assert [len(block) for block in counted.blocks] == [14, 25, 49, 33]
    assert [counted.layers[block[-2]].positions for block in counted.blocks[:3]] == [3136, 784, 196]
    assert [region.name for region in counted.regions] == [f"R{number}" for number in range(1, 9)]
    # 7,978,856 parameters less the last normalisation's, which is counted with the classifier
    assert sum(layer.parameters for layer in counted.layers) == 7_978_856


@pytest.mark.parametrize(
    ("name", "layers", "blocks"),
    [
        ("ResNet-50", 54, [12, 13, 19, 10]),
        pytest.param("ResNet-101", 105, [12, 13, 70, 10], marks=pytest.mark.long),
        ("MobileNet V3 (alpha=0.25)", 64, [4, 6, 15, 22, 17]),
        pytest.param("MobileNet V3 (alpha=1)", 64, [4, 6, 15, 22, 17], marks=pytest.mark.long),
    ],
)
def test_other_networks(name, layers, blocks):
    counted = network(name, 32)
    assert (len(counted.layers), [len(block) for block in counted.blocks]) == (layers, blocks)


def test_unknown_networks_are_refused():
    with pytest.raises(ValueError, match=r"name='VGG': choose one of 'DenseNet-121 \(k=12\)'"):
        counted_network("VGG", 32)


def test_figure_1_issue_weighs_more_in_later_blocks():
    """Holds in order: the ratio rises from block to block.

    Not its size: up to 4 in the paper, 2.4 here, where issuing is *given* as 60 microseconds, 4 times the paper's
    shortest execution. Nor that DenseBlock-3 and 4 take two thirds of the execution: a third by the count.
    """
    ratios = issue_ratios(network(DENSENET, 32))
    highest, mean = [max(block) for block in ratios], [sum(block) / len(block) for block in ratios]
    assert highest == sorted(highest)
    assert mean == sorted(mean)
    assert highest[3] == pytest.approx(2.36, abs=0.01)
    assert highest[0] < 1
    forward = [
        sum(profile(DENSENET).main_ms[task] for task in region.tasks) for region in network(DENSENET, 32).regions[4:]
    ]
    assert sum(forward[2:]) / sum(forward) == pytest.approx(0.35, abs=0.01)


def test_figure_2_the_device_waits_for_issue_where_kernels_are_short():
    """Holds for k=12, where the wait per millisecond of execution grows tenfold from block 1 to 3.

    For k=32 it does not: the first blocks' kernels take so long that issuing stays ahead to the end of DenseBlock-4.
    """
    counted = network(NARROW, 32)
    executed = [sum(profile(NARROW).main_ms[task] for task in region.tasks) for region in counted.regions[4:]]
    share = [wait / run for wait, run in zip(issue_waits_ms(counted), executed, strict=True)]
    assert share == sorted(share)
    assert share[3] > 10 * share[0]
    assert issue_waits_ms(network(DENSENET, 32)) == pytest.approx([0.06, 0, 0, 0], abs=1e-6)


def test_thread_blocks_of_dense_block_4():
    """Holds: half of its weight gradients have the same number of thread blocks, below the capacity of 1,520.

    288 by the count, 448 in the paper, whose library we do not know.
    """
    counted = network(DENSENET, 32)
    numbers = [counted.kernels(Task(Kind.W, layer))[0].thread_blocks for layer in counted.blocks[3]]
    assert (numbers.count(288), len(numbers)) == (16, 33)
    forward = [kernel.thread_blocks for task in counted.regions[4].tasks for kernel in counted.kernels(task)]
    assert min(forward) > 8 * CAPACITY  # R5 of section 8.2: many more than the capacity


def test_figure_8_the_speedups_of_its_regions():
    """R5 holds: 1.10 in the paper, for underfilled weight gradients of DenseBlock-4 beside long kernels; 1.12 counted.

    R2 does not: 1.06 in the paper, 1.23 counted. There over 30 % of its kernels have as many thread blocks as the
    device; here none, so places stay free in their last waves. Setting up kernels takes 5 % there, 3 % here.
    """
    assert pair(block=4, region=5) == pytest.approx(1.12, abs=0.005)
    assert pair(block=3, region=2) == pytest.approx(1.23, abs=0.005)
    counted = network(DENSENET, 32)
    kernels = [kernel for task in counted.regions[1].tasks for kernel in counted.kernels(task)]
    assert not [kernel for kernel in kernels if kernel.thread_blocks % CAPACITY == 0]
    alone_ms = sum(profile(DENSENET).main_ms[task] for task in counted.regions[1].tasks)
    assert len(kernels) * SETUP_MS / alone_ms == pytest.approx(0.03, abs=0.005)


def test_figure_8_a_region_gains_what_its_main_stream_leaves():
    """The reason holds: of R5 to R8 those gain more whose main-stream leaves more places free.

    So the placement does not: the paper puts DenseBlock-4's weight gradients beside R5, Algorithm 1 on counted
    profiles beside R7 and R8. R5, which gains the most in the paper, gains the least of the forward pass.
    """
    counted = network(DENSENET, 32)
    work = [
        sum(kernel.thread_blocks * kernel.block_ms for task in region.tasks for kernel in counted.kernels(task))
        for region in counted.regions
    ]
    alone_ms = [sum(profile(DENSENET).main_ms[task] for task in region.tasks) for region in counted.regions]
    free = [1 - used / CAPACITY / took for used, took in zip(work, alone_ms, strict=True)]
    by_free = sorted(range(4, 8), key=free.__getitem__)
    gains = [ran(DENSENET, "joint").regions[index].speedup for index in by_free]
    assert by_free == [4, 5, 6, 7]
    assert gains == sorted(gains)
    assert gains[0] == pytest.approx(1.054, abs=0.001)
    assert gains[-1] == pytest.approx(1.311, abs=0.001)
    plan = joint_schedule(counted.regions, profile(DENSENET))
    last = {Task(Kind.W, layer) for layer in counted.blocks[3][:-1]}
    assert last <= {*plan.sub[6], *plan.sub[7]}


@pytest.mark.parametrize(
    ("name", "batch_size", "ready", "joint"),
    [
        (DENSENET, 32, 1.070, 1.090),
        (NARROW, 32, 1.272, 1.301),
        ("MobileNet V3 (alpha=0.25)", 32, 1.253, 1.342),
        pytest.param("ResNet-50", 32, 1.044, 1.071, marks=pytest.mark.long),
    ],
)
def test_section_8_2_two_streams_and_reordering(name, batch_size, ready, joint):
    """Holds in order: least for ResNet, most for narrow networks, and more with re-ordering.

    ResNet-50 gains 1.01 to 1.02 at batch 64 in the paper; the count gives 1.021 in the layers' order, 1.030 re-ordered.

    The largest is 1.15 in the paper (MobileNet, alpha=0.25) and 1.34 here: a device that is not full is slower here in
    proportion, so what fills it gains too much.
    """
    assert speed(name, "ready", batch_size) == pytest.approx(ready, abs=0.001)
    assert speed(name, "joint", batch_size) == pytest.approx(joint, abs=0.001)
    assert ran(name, "joint", batch_size).idle_share < ran(name, "one", batch_size).idle_share


def test_figure_9_memory_of_weight_gradients_that_wait():
    """Holds for what DenseBlock-4's keep: 176 MB more at its end, up to 200 MB in the paper; the peak comes early.

    Not the peak: 0.1 % more in the paper, 0.4 % here as Figure 8 places them, 2.3 % as Algorithm 1 does. Nor the
    largest difference, 1.5 GB: kernels of DenseBlock-1 and 2 leave so little room that the sub-stream lags behind.
    """
    conventional, delayed = (ran(DENSENET, how).timeline for how in ("one", "figure 8"))
    before, after = memory_by_layer(conventional), memory_by_layer(delayed)
    first_of_block_4 = network(DENSENET, 32).blocks[3][0]
    assert after[first_of_block_4] - before[first_of_block_4] == 175_681_536
    assert (conventional.peak_bytes, delayed.peak_bytes) == (3_973_361_568, 3_990_626_304)
    assert conventional.peak_ms < 0.01 * conventional.makespan_ms
    assert max(after[layer] - before[layer] for layer in before) == pytest.approx(1.5e9, rel=0.01)
    assert ran(DENSENET, "joint").timeline.peak_bytes / conventional.peak_bytes == pytest.approx(1.023, abs=0.0005)


def test_memory_constraint_of_section_8_2():
    """1.1 of the conventional execution is kept without pre-scheduling a region; in 1.0 of it some are."""
    counted = network(DENSENET, 32)
    peak_bytes = ran(DENSENET, "one").timeline.peak_bytes
    plans = [
        joint_schedule_within(int(share * peak_bytes), counted.regions, profile(DENSENET), counted.buffers())
        for share in (1.1, 1.0)
    ]
    assert plans[0] == joint_schedule(counted.regions, profile(DENSENET))
    assert plans[1] != plans[0]
