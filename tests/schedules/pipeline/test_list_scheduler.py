"""The list scheduler on random models: valid, within its cap, as fast as it says, never below the bound."""

import random

import pytest

from retime.schedules import Kind
from retime.schedules import pipeline as p

FORWARD_FIRST = (Kind.F, Kind.O, Kind.W)


def drawn(seed):
    """(placement, micro-batches, costs, hops, whether O1 is listed)"""
    chance = random.Random(seed)
    ranks = chance.randint(1, 6)
    stages = chance.randint(2 * ranks, 4 * ranks)
    placement = chance.choice((p.block, p.modulo, p.v_shape))(stages, ranks)
    times = [tuple(chance.choice((0, 0.5, 1, 1.25, 3)) for _ in range(stages)) for _ in range(3)]
    sizes = tuple(chance.choice((1, 2, 7)) for _ in range(stages))
    table = [[chance.choice((0, 0.1, 0.5, 2)) for _ in range(ranks)] for _ in range(ranks)]
    return placement, chance.randint(1, 12), p.StageCosts(*times, sizes), table, chance.random() < 0.5


def least_makespan_ms(placement, micro_batches, costs, hops, lists_o1):
    """No schedule is below a micro-batch's own way, nor below the way to a rank's first stage and all of its work."""
    where, stages = placement.rank_of, placement.stages

    def hop_ms(source, target):
        return 0 if where[source] == where[target] else hops[where[source]][where[target]]

    arrives = [0.0]
    for stage in range(1, stages):
        arrives.append(arrives[-1] + costs.forward_ms[stage - 1] + hop_ms(stage - 1, stage))
    output_ms = costs.output_gradient_ms if lists_o1 else (0.0, *costs.output_gradient_ms[1:])
    way = arrives[-1] + costs.forward_ms[-1] + sum(output_ms) + costs.weight_gradient_ms[0]
    way += sum(hop_ms(stage, stage - 1) for stage in range(1, stages))
    work = [0.0] * placement.ranks
    for stage, times in enumerate(zip(costs.forward_ms, output_ms, costs.weight_gradient_ms, strict=True)):
        work[where[stage]] += micro_batches * sum(times)
    first = [min(arrives[stage - 1] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
    return max(way, *map(sum, zip(first, work, strict=True)))


def keeps(cap, peaks):
    caps = cap if isinstance(cap, list | tuple) else [cap] * len(peaks)
    return all(most is None or peak <= most * (1 + 1e-9) for peak, most in zip(peaks, caps, strict=True))


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 150))])
def test_random_models(seed):
    placement, micro_batches, costs, hops, lists_o1 = drawn(seed)
    chance = random.Random(-seed)
    least = p.least_cap(placement, costs)
    cap = chance.choice((None, least, [1.4 * size for size in least], max(least)))
    limit = chance.choice((None, 1, 3))
    waiting = p.Rule(wait_ms=chance.choice((0.1, 1.0, 4.0)))
    for rule in (p.GREEDY, waiting, p.Rule(FORWARD_FIRST, in_flight=limit), p.Rule((Kind.O, Kind.W, Kind.F)), p.FLUSH):
        if rule.flush:
            cap = None
        schedule, makespan_ms = p.list_schedule(
            placement, micro_batches, costs, hops=hops, cap=cap, rule=rule, first_output_gradient=lists_o1
        )
        p.validate_pipeline(schedule, placement, micro_batches)
        ran = p.simulate_pipeline(schedule, placement, costs, hops=hops)
        assert keeps(cap, ran.peak_bytes)
        if cap is None and rule.in_flight is None and not rule.wait_ms:
            assert ran.makespan_ms == pytest.approx(makespan_ms)
        else:  # ranks that waited while the order was found need not
            assert ran.makespan_ms <= makespan_ms * (1 + 1e-9)
        bound = least_makespan_ms(placement, micro_batches, costs, hops, lists_o1)
        assert ran.makespan_ms >= bound * (1 - 1e-9)
        again, _ = p.list_schedule(
            placement, micro_batches, costs, hops=hops, cap=cap, rule=rule, first_output_gradient=lists_o1
        )
        assert again == schedule


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("hop_ms", [0, 0.5])
def test_greedy_is_no_slower_than_flush_where_stages_are_alike(ranks, chunks, hop_ms):
    stages, costs = ranks * chunks, p.StageCosts.uniform(ranks * chunks)
    for micro_batches in (ranks, 2 * ranks, 3 * ranks):
        flush, greedy = (
            p.list_schedule(p.modulo(stages, ranks), micro_batches, costs, hops=hop_ms, rule=rule)[1]
            for rule in (p.FLUSH, p.GREEDY)
        )
        assert greedy <= flush


def test_a_weight_gradient_runs_on_demand_when_the_cap_binds():
    placement = p.block(1, 1)
    free, _ = p.list_schedule(placement, 3, p.StageCosts.uniform(1), rule=p.Rule(FORWARD_FIRST))
    capped, _ = p.list_schedule(placement, 3, p.StageCosts.uniform(1), rule=p.Rule(FORWARD_FIRST), cap=2)
    assert str(free) == "rank0: F1@0 F1@1 F1@2 W1@0 W1@1 W1@2"
    assert str(capped) == "rank0: F1@0 F1@1 W1@0 F1@2 W1@1 W1@2"


def test_the_least_cap_is_enough_and_less_is_refused():
    costs = p.StageCosts((1,) * 6, (1,) * 6, (1,) * 6, (5, 1, 1, 1, 1, 1))
    placement = p.modulo(6, 2)
    assert p.least_cap(placement, costs) == (7, 3)
    schedule, _ = p.list_schedule(placement, 4, costs, cap=(7, 3))
    p.validate_pipeline(schedule, placement, 4)
    assert keeps((7, 3), p.simulate_pipeline(schedule, placement, costs).peak_bytes)
    with pytest.raises(ValueError, match=r"cap=6 on rank 0 .* least feasible cap is 7 on this rank, and 7 for all"):
        p.list_schedule(placement, 4, costs, cap=6)
    with pytest.raises(ValueError, match=r"cap=2 on rank 1 .* is 3 on this rank"):
        p.list_schedule(placement, 4, costs, cap=(7, 2))


def test_a_link_carries_one_message_at_a_time():
    placement = p.modulo(4, 2)
    costs = p.StageCosts((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0))
    schedule, makespan_ms = p.list_schedule(placement, 2, costs, hops=[[0, 5], [0, 0]])
    # F1, F3 and O3 of two micro-batches go from rank 0 to rank 1; the six messages take turns on the one link
    start = p.simulate_pipeline(schedule, placement, costs, hops=[[0, 5], [0, 0]]).timeline.start_ms
    reads = sorted(ms for task, ms in start.items() if str(task)[:2] in ("F2", "F4", "O2"))
    assert reads == [6, 11, 16, 21, 26, 31]
    assert makespan_ms == 31


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"micro_batches": 0}, "micro_batches=0: give 1 or more"),
        ({"hops": -1}, "the hop from rank 0 to rank 1 is -1.0"),
        ({"hops": [[0.0]]}, "give 2 x 2, or one number"),
        ({"cap": [4]}, "cap has 1 entries for 2 ranks"),
        ({"cap": float("nan")}, "cap=nan on rank 0"),
        ({"costs": p.StageCosts.uniform(3)}, "costs are of 3 stages, the placement has 4"),
        ({"rule": p.Rule((Kind.F, Kind.O))}, "give F, O and W, each once"),
        ({"rule": p.Rule(in_flight=0)}, "in_flight=0: give 1 or more"),
        ({"rule": p.Rule(flush=True, in_flight=2)}, "the flush form has all micro-batches in flight"),
        ({"rule": p.FLUSH, "cap": 4}, "the least feasible cap is 6 on this rank.*take a rule without flush"),
    ],
)
def test_refusals(arguments, says):
    with pytest.raises(ValueError, match=says):
        p.list_schedule(
            **{"placement": p.block(4, 2), "micro_batches": 3, "costs": p.StageCosts.uniform(4)} | arguments
        )


def test_a_rank_waits_for_what_is_on_its_way():
    """A weight gradient that begins just before an output gradient arrives holds it up; one that waits does not."""
    placement, costs = p.modulo(16, 4), p.StageCosts(*[(20,) * 16] * 3)
    at_once, waiting = (
        p.list_schedule(placement, 4, costs, hops=1.0, rule=p.Rule(wait_ms=wait), first_output_gradient=True)
        for wait in (0.0, 2.0)
    )
    assert at_once[1] == 1056
    assert waiting[1] == 1038
    p.validate_pipeline(waiting[0], placement, 4)
    with pytest.raises(ValueError, match="wait_ms=-1"):
        p.list_schedule(placement, 4, costs, rule=p.Rule(wait_ms=-1.0))
