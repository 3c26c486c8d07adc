"""What the planner chooses: fast-forwarding that no published order of equal layers beats, within a cap."""

import pickle
import random

import pytest

from retime.mechanisms.pipeline import Costs, PipelineError, Planner

LARGE_IS_LATER = [(16, 4, 4), pytest.param(32, 8, 16, marks=pytest.mark.long), (12, 4, 8), (12, 2, 4)]
PUBLISHED = ("gpipe", "1f1b", "zb_h1", "zbv", "interleaved", "interleaved_zero_bubble")


def alive(plan):
    """By rank, the most layers whose activations an order keeps."""
    most_layers = []
    for order in plan.orders.values():
        now = most = 0
        for kind, stage, _ in order:
            now += {"F": 1, "W": -1, "B": -1}.get(kind, 0) * len(plan.layers_of(stage))
            most = max(most, now)
        most_layers.append(most)
    return most_layers


@pytest.mark.parametrize("hop_ms", [0.0, 1.0, 36.0])
@pytest.mark.parametrize(("layers", "ranks", "micro_batches"), LARGE_IS_LATER)
def test_no_published_order_is_faster_on_paper(layers, ranks, micro_batches, hop_ms):
    costs = Costs((20.0,) * layers, (1,) * layers, hop_ms)
    ours = Planner("ooo2", ranks, costs).plan(micro_batches).makespan_ms
    for name in PUBLISHED:
        assert ours <= Planner(name, ranks, costs).plan(micro_batches).makespan_ms * (1 + 1e-9)


@pytest.mark.parametrize("hop_ms", [pytest.param(0.0, marks=pytest.mark.long), 16.0])
def test_nor_is_zbv_at_its_own_memory(hop_ms):
    """Where list schedules under the cap are longer, the order is ZBV's."""
    costs = Costs((30.0,) * 32, (1,) * 32, hop_ms, task_ms=0.8)
    zbv = Planner("zbv", 8, costs).plan(16)
    ours = Planner("ooo", 8, costs, group=1, cap=32).plan(16)
    assert max(alive(ours)) <= max(alive(zbv)) == 32
    assert ours.makespan_ms <= zbv.makespan_ms * (1 + 1e-9)


@pytest.mark.parametrize(("layers", "ranks"), [(12, 8), (24, 16), (10, 4)])
def test_nor_where_ranks_have_different_numbers_of_layers(layers, ranks):
    costs = Costs((1.0,) * layers, (1,) * layers, 0.05)
    ours = Planner("ooo2", ranks, costs).plan(ranks).makespan_ms
    for name in ("gpipe", "1f1b", "zb_h1", "interleaved", "interleaved_zero_bubble"):
        assert ours <= Planner(name, ranks, costs).plan(ranks).makespan_ms * 1.01


@pytest.mark.parametrize("seed", range(10))
def test_with_layers_of_different_lengths_none_of_the_same_allocation_is(seed):
    chance = random.Random(seed)
    layers, ranks = chance.randint(8, 16), chance.choice((2, 4))
    costs = Costs(tuple(chance.choice((1.0, 2.0)) for _ in range(layers)), (1,) * layers, chance.choice((0.0, 0.1)))
    ours = Planner("ooo2", ranks, costs).plan(4).makespan_ms
    any_cut = Planner("ooo", ranks, costs).plan(4).makespan_ms
    assert any_cut <= ours
    for name in ("interleaved", "interleaved_zero_bubble"):
        assert ours <= Planner(name, ranks, costs).plan(4).makespan_ms * (1 + 1e-9)


def test_a_cap_is_kept():
    costs = Costs((20.0,) * 16, (1,) * 16, 1.0)
    free = Planner("ooo2", 4, costs, group=1).plan(8)
    capped = Planner("ooo2", 4, costs, group=1, cap=16).plan(8)
    assert max(alive(free)) > 16 >= max(alive(capped))
    assert capped.makespan_ms >= free.makespan_ms
    with pytest.raises(
        PipelineError, match=r"activation_cap=2 B is too low for schedule='ooo2_flush': .* 8 micro-batch"
    ):
        Planner("ooo2_flush", 4, costs, cap=2).plan(8)
    with pytest.raises(PipelineError, match=r"activation_cap=16 B is not kept by schedule='gpipe', but by ooo, ooo1,"):
        Planner("gpipe", 4, costs, cap=16)
    large = Costs((1.0,) * 16, (2**20 + 1,) * 16, 1.0)
    wanted = (
        r"=3 KiB is too low for schedule='ooo': .* one micro-batch take 4 MiB on rank 0. Give activation_cap=4194308"
    )
    with pytest.raises(PipelineError, match=wanted) as caught:
        Planner("ooo", 4, large, cap=3072).plan(8)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_of_all_cuts_the_one_with_the_shortest_step_is_kept():
    costs = Costs((1.0,) * 32, (1,) * 32, 0.5)
    planner = Planner("ooo", 8, costs, cap=32)
    plan = planner.plan(16)
    assert (plan.name, plan.stages, plan.makespan_ms) == ("ooo_v", 32, 216.5)
    assert max(alive(plan)) <= 32
    again = planner.plan(4)  # a last batch that is shorter: stages stay where they are
    assert (again.name, again.rank_of) == ("ooo_v", plan.rank_of)
    with pytest.raises(PipelineError, match="activation_cap=3 B is too low"):
        Planner("ooo", 8, costs, cap=3).plan(16)


def test_what_each_task_takes_beside_its_layers_makes_for_fewer_stages():
    layers = (1.0,) * 16
    free = Planner("ooo2", 2, Costs(layers, (1,) * 16, 0.0)).plan(4)
    dear = Planner("ooo2", 2, Costs(layers, (1,) * 16, 0.0, 0.5)).plan(4)
    assert dear.stages < free.stages


def test_messages_that_take_the_processor_make_for_fewer_stages():
    layers = (1.0,) * 16
    free = Planner("ooo2", 2, Costs(layers, (1,) * 16, 0.01)).plan(4)
    dear = Planner("ooo2", 2, Costs(layers, (1,) * 16, 0.01, message_ms=0.5)).plan(4)
    assert dear.stages < free.stages
    assert dear.makespan_ms > free.makespan_ms
    one = Planner("ooo1", 2, Costs((1.0,) * 2, (1,) * 2, 0.0)).plan(1).makespan_ms
    # F1, F2, O2, W2 and both gradients of stage 1, with one message forth and one back: each is sent and received
    assert Planner("ooo1", 2, Costs((1.0,) * 2, (1,) * 2, 0.0, message_ms=0.5)).plan(1).makespan_ms == one + 4 * 0.5


def test_the_first_stage_runs_both_gradients_where_they_follow_each_other():
    costs = Costs((1.0,) * 4, (1,) * 4, 0.0)
    plan = Planner("zb_h1", 2, costs).plan(4)
    kinds = {kind for kind, stage, _ in plan.orders[0] if stage == 0}
    assert kinds == {"F", "B"}
    assert plan.waiting == {(1, batch) for batch in range(4)}
    assert Planner("gpipe", 2, costs).plan(4).waiting == frozenset()


def shares(plan, sizes):
    """By rank, the bytes of its layers."""
    ranks = [plan.rank_of[stage] for stage in plan.stage_of]
    return [sum(size for size, at in zip(sizes, ranks, strict=True) if at == rank) for rank in sorted(set(ranks))]


@pytest.mark.parametrize("schedule", ["ooo2", "ooo", "ooo1", "ooo_v", "1f1b", "zbv", "LoopedBFS"])
def test_an_even_split_does_not_look_at_times(schedule):
    """Equal layers are dealt out equally, whatever was measured; orders fit the measured times all the same."""
    splits = set()
    for seed in range(6):
        chance = random.Random(seed)
        costs = Costs(
            tuple(chance.uniform(0.1, 30) for _ in range(12)),
            (1,) * 12,
            chance.uniform(0, 9),
            chance.uniform(0, 2),
            parameter_bytes=(64,) * 12,
        )
        plan = Planner(schedule, 2, costs, split="even").plan(4)
        splits.add((plan.name, plan.stage_of, plan.rank_of))
        assert shares(plan, costs.parameter_bytes) == [384, 384]
    assert len(splits) == 1


def test_an_even_split_counts_bytes():
    sizes = (38 + 7, *(7,) * 10, 38 + 7)  # an embedding in front, a head behind
    costs = Costs((1.0,) * 12, (1,) * 12, 0.0, parameter_bytes=sizes)
    assert shares(Planner("1f1b", 4, costs, split="even").plan(4), sizes) == [45, 35, 35, 45]
    assert shares(Planner("1f1b", 4, costs).plan(4), sizes) == [59, 21, 21, 59]
    few = Costs((1.0,) * 3, (1,) * 3, 0.0, parameter_bytes=(0, 0, 0))  # nothing to train in them: by number
    assert Planner("ooo2", 3, few, split="even").plan(4).stage_of == (0, 1, 2)
    with_empty = Costs((1.0,) * 5, (1,) * 5, 0.0, parameter_bytes=(9, 0, 9, 0, 9))
    assert shares(Planner("ooo1", 2, with_empty, split="even").plan(4), (9, 0, 9, 0, 9)) in ([9, 18], [18, 9])


def test_a_split_by_names_is_kept():
    costs = Costs((1.0,) * 6, (1,) * 6, 0.0, parameter_bytes=(1,) * 6)
    assert Planner("1f1b", 2, costs, split=(0, 5)).plan(4).stage_of == (0, 0, 0, 0, 0, 1)
    assert Planner("ooo", 2, costs, split=(0, 1, 2, 5)).plan(4).stage_of == (0, 1, 2, 2, 2, 3)
    several = "2, 4 or another multiple of 2"
    for schedule, allowed, number in (
        ("1f1b", "one a rank", 2),
        ("zbv", "two a rank", 4),
        ("ooo2", "the same number for each rank", several),
    ):
        message = f"split names 3 stages, and schedule='{schedule}' has {allowed} on 2 ranks: name {number} layers"
        with pytest.raises(PipelineError, match=message):
            Planner(schedule, 2, costs, split=(0, 2, 4)).plan(4)
    with pytest.raises(PipelineError, match=f"split names 3 stages, .* ranks: name {several} layers"):
        Planner("ooo", 2, costs, split=(0, 2, 4)).plan(4)


def test_few_layers_leave_cuts_out():
    costs = Costs((1.0,) * 5, (1,) * 5, 0.0)
    assert Planner("ooo", 4, costs).plan(4).name in ("ooo1", "ooo2")
    for name in ("ooo_v", "InterleavedZeroBubble"):
        with pytest.raises(
            PipelineError, match=f"'{name}' has two stages a rank, and 5 layers are too few for 4 ranks"
        ):
            Planner(name, 4, costs)


@pytest.mark.parametrize("schedule", ["zbv", "ooo_v", "InterleavedZeroBubble", "ZBVZeroBubble", "interleaved"])
def test_one_rank_has_one_stage(schedule):
    plan = Planner(schedule, 1, Costs((1.0,) * 3, (1,) * 3, 0.0)).plan(2)
    assert (plan.name, plan.stages) == (schedule, 1)
    assert sorted(micro_batch for kind, _, micro_batch in plan.orders[0] if kind == "F") == [0, 1]
