"""Figure 17 for real: two ranks inside a budget, how often they reduce, and that they learn what one process learns."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retime.recipes.core.results import Point, Result, Row, load
from retime.recipes.core.schema import Hardware
from retime.recipes.modnn.rank_worker import EACH, NAIVE, NAIVE_ONCE, ON_HOST, ONCE, ONE, PLANNED, WHOLE
from retime.recipes.modnn.ranks import REDUCED, REFUSED, WAYS, Ranks
from retime.recipes.modnn.settings import MemorySettings, claim, target
from retime.recipes.modnn.side_by_side import BUDGET, DIFFERENCE, MEASURED, PREDICTED, STEP


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")
def test_two_ranks(run: Callable[..., Path]) -> None:
    mlp = "{_target_: retime.recipes.models.mlp, depth: 6, width: 32}"
    data = "{_target_: retime.recipes.data.synthetic_vectors, features: 32, classes: 32, length: 4096}"
    cases = f"+cases={{MLP: {{batch_size: 4096, model: {mlp}, data: {data}}}}}"
    path = run("experiment=modnn_fig17", "~cases", cases, "budgets=[36,5]", "rounds=1", "warmup_rounds=1", "steps=1")
    result = load(path)
    point, tight = result.points
    assert "below this step's floor" in tight.facts[REFUSED]
    assert tight.rows == []
    assert point.variants(STEP) == [ONE, *WAYS]

    (plan,) = {point.facts["plans"][way] for way in (*PLANNED, EACH)}
    sub_batches = -(-2048 // int(plan.split()[1].rstrip(",")))
    assert f"have one plan, which one rank made: {plan}" in path.with_name("result.md").read_text()
    assert sub_batches > 1, "or there is nothing to compare"
    weights_mib = 6 * (32 * 32 + 32) * 4 / 2**20
    assert point.values(WHOLE, REDUCED) == point.values(ONCE, REDUCED) == pytest.approx([weights_mib])
    assert point.values(EACH, REDUCED) == pytest.approx([sub_batches * weights_mib])

    for way in (*PLANNED, EACH):
        assert point.values(way, BUDGET) == point.values(ONCE, BUDGET)
    assert point.values(ONCE, PREDICTED) <= point.values(ONCE, BUDGET)
    # one process has the whole batch, so the ranks' own share cannot need more
    assert point.values(WHOLE, PREDICTED) < point.values(ONE, PREDICTED)
    assert point.variants(MEASURED) == [ONE, *WAYS]
    assert all(point.values(way, MEASURED)[0] > 0 for way in (ONE, *WAYS))

    for way in WAYS:
        assert point.values(way, DIFFERENCE)[0] < 10
    compared = {line.against: line.measured for line in Ranks().compare(result)}
    lines = [line.note for line in Ranks().compare(result) if line.against == target("host-meanwhile")]
    assert [note.split(", over ")[1] for note in lines] == [NAIVE, NAIVE_ONCE, ONCE]
    for wanted in ("once-over-each", "within-budget", "prediction-error", "ranks-difference"):
        assert compared[target(wanted)] is not None
    assert compared[claim("figure-17-ideal")] is not None
    assert compared[claim("figure-17-modnn")] is None
    assert compared[claim("figure-18-6-gb-naive")] is None


def point(sub_batch: int, measured_mib: float) -> Point:
    """Two ranks of 8 samples each, with 4 MiB each, of which 2 are predicted to be held."""
    rows = [Row(way, STEP, "ms", [time]) for way, time in ((ONE, 30.0), (WHOLE, 15.0), (ONCE, 20.0), (EACH, 25.0))]
    rows += [Row(way, DIFFERENCE, "ppm", [0.5]) for way in (WHOLE, ONCE, EACH)]
    mib = {BUDGET: 4.0, PREDICTED: 2.0, MEASURED: measured_mib}
    rows += [Row(ONCE, quantity, "MiB", [value]) for quantity, value in mib.items()]
    plans = {ONCE: f"sub-batch {sub_batch}, prefetch 1, offload none of 9"}
    facts = {"batch size": 16, "ranks": 2, "cores": 2, "plans": plans}
    return Point({"network": "net", "budget": 50.0}, {}, rows, facts)


def lines(given: Point) -> dict[str, tuple[float | None, str]]:
    compared = Ranks().compare(Result("", "", "modnn", "Figure 17", "", [given]))
    return {line.against.what: (line.measured.median if line.measured else None, line.note) for line in compared}


def test_plans_that_differ_are_told_by_way() -> None:
    given = point(sub_batch=4, measured_mib=2.0)
    given.facts["plans"][EACH] = "sub-batch 2"
    (*_, told) = Ranks().notes(Result("", "", "modnn", "Figure 17", "", [given]))
    assert told == f"- net, 50 %: {ONCE}: {given.facts['plans'][ONCE]}; {EACH}: sub-batch 2"


def test_ways_whose_plans_differ_are_not_compared() -> None:
    given = point(sub_batch=4, measured_mib=2.0)
    given.rows.extend(Row(way, STEP, "ms", [20.0]) for way in (NAIVE, NAIVE_ONCE, ON_HOST))
    for plan, ratio in ((given.facts["plans"][ONCE], 1.0), ("sub-batch 2", None)):
        given.facts["plans"] |= {NAIVE_ONCE: given.facts["plans"][ONCE], ON_HOST: plan}
        assert lines(given)[target("host-meanwhile").what][0] == ratio


def test_ranks_without_a_gpu_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    settings = MemorySettings(hardware=Hardware("cuda", "cuda", None), cases={"net": {}}, budgets=[50], devices=2)
    with pytest.raises(ValueError, match="devices=2: each rank needs a GPU, and there are 1"):
        Ranks().points(settings)
    settings.devices = 1
    assert len(Ranks().points(settings)) == 1


def test_peaks_of_ranks_are_held_against_the_budget_and_the_prediction() -> None:
    over = lines(point(sub_batch=4, measured_mib=5.0))
    where = f"net with 2 ranks on 2 cores, 50 %, {ONCE}"
    assert over[target("within-budget").what] == (1.25, f"{where}: 5.00 MiB in 4.00 MiB")
    assert over[target("prediction-error").what] == (150.0, f"{where}: 5.00 MiB where 2.00 MiB were predicted")
    less = lines(point(sub_batch=4, measured_mib=1.0))
    assert less[target("prediction-error").what][0] == 50.0, "too much predicted is an error too"


@pytest.mark.parametrize(("sub_batch", "compared"), [(7, True), (8, False), (9, False)])
def test_one_sub_batch_leaves_nothing_to_compare(sub_batch: int, compared: bool) -> None:
    ratio, remark = lines(point(sub_batch, measured_mib=2.0))[target("once-over-each").what]
    assert ratio == (1.25 if compared else None)
    assert ("nothing to compare" in remark) is not compared
