"""`cpuacc_table4` in small, and which layer a sum belongs to."""

import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from retime.mechanisms.cpu_accumulation import SumTimes, TimedSum
from retime.recipes.core.results import Point, Row
from retime.recipes.cpuacc import worker
from retime.recipes.cpuacc.layer_table import ALL, ALONE, LayerTable, exposure, published
from retime.recipes.cpuacc.worker import ADD, BACKWARD, BRING, EXPOSED, QUANTITIES, TAKE, WAIT, of_pass
from support.recipes import ran, settings_for

SMALL = (
    *("experiment=cpuacc_table4", "rank_counts=[2]", "rounds=2", "warmup_rounds=0", "cases.AlexNet.batch_size=2"),
    *("cases.AlexNet.model.width=0.03125", "cases.AlexNet.model.image_size=64", "cases.AlexNet.data.image_size=64"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_it_measures_every_layer(tmp_path: Path) -> None:
    settings = settings_for(*SMALL)
    recipe = LayerTable()
    result = ran(recipe, settings, tmp_path)
    (point,) = result.points
    layers = [f"layer {number}" for number in range(8, 0, -1)]
    for quantity in QUANTITIES:
        assert point.variants(quantity) == [*layers, ALL]
    for label in layers:
        for quantity in (BACKWARD, BRING, ADD, TAKE):
            assert min(point.values(label, quantity)) > 0, (label, quantity)
    assert len(point.values(ALL, ALONE)) == 2
    assert point.facts["layers"]["layer 8"] == "21, 129,000 parameters"
    table, totals = published()
    assert [line.against for line in recipe.compare(result)[:3]] == totals
    by_layer = [line.against.value for line in recipe.compare(result)[3:]]
    assert by_layer == [time for times in table.values() for time in times]
    assert f"  - {exposure(point)}" in recipe.notes(result)


@pytest.mark.usefixtures("one_rank")
def test_passes_with_sums_and_without_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock(**{"of_pass.return_value": {quantity: [1.0] for quantity in QUANTITIES}})
    calls.no_sync.side_effect = lambda: nullcontext()
    monkeypatch.setattr(worker.DistributedDataParallel, "no_sync", lambda network: calls.no_sync())
    monkeypatch.setattr(worker, "HostReducer", Mock())
    monkeypatch.setattr(worker, "BucketReduction", lambda network, reducer: calls)
    monkeypatch.setattr(worker, "of_pass", calls.of_pass)
    model = {"_target_": "retime.recipes.models.mlp", "depth": 2, "width": 8}
    data = {"_target_": "retime.recipes.data.synthetic_vectors", "features": 8, "classes": 8}
    request = {"hardware": {"device": "cpu"}, "model": model, "data": data, "batch_size": 2, "seed": 0}
    answer = worker.layers({**request, "rounds": 2, "warmup_rounds": 0})
    assert [name for name, *_ in calls.method_calls] == ["no_sync", "of_pass", "of_pass", "no_sync", "close"]
    assert answer["ms"][ADD] == [[1.0], [1.0]]
    assert [parameters for _, parameters in answer["layers"]] == [72, 72]


def _sum(size: int, given: float, began: float, ended: float) -> TimedSum:
    return TimedSum(size, given, began, ended, SumTimes(1.0, 2.0, 3.0, 4.0))


def test_sums_belong_to_layers_in_the_order_of_the_backward_pass() -> None:
    """The last layer's sum and the end of the one before it run when the backward pass, from 1 s to 4 s, is over."""
    sums = [_sum(4, 3.0, 3.5, 4.5), _sum(8, 3.5, 4.5, 5.0), _sum(2, 4.0, 5.0, 5.25), _sum(8, 2.0, 2.0, 2.5)]
    found = of_pass(1.0, sums, [8, 12, 2])
    assert found[BACKWARD] == [1000, 1500, 500]
    assert found[EXPOSED] == [0, 1000, 250]
    assert (found[BRING], found[ADD], found[TAKE], found[WAIT]) == ([1, 2, 1], [2, 4, 2], [3, 6, 3], [4, 8, 4])


def test_a_bucket_of_two_layers_and_sums_through_gloo_are_refused() -> None:
    with pytest.raises(ValueError, match="two layers"):
        of_pass(0.0, [_sum(20, 1.0, 1.0, 2.0)], [8, 12])
    with pytest.raises(ValueError, match="gloo"):
        of_pass(0.0, [TimedSum(8, 1.0, 1.0, 2.0, None)], [8])


@pytest.mark.parametrize(
    ("exposed", "said"), [((0.0, 1.0), "of layer 1: no more"), ((0.5, 1.0), "of layer 2, layer 1: more than")]
)
def test_what_is_exposed_is_named(exposed: tuple[float, float], said: str) -> None:
    rows = [Row(label, ADD, "ms", [1.0]) for label in ("layer 2", "layer 1", ALL)]
    rows += [Row(ALL, quantity, "ms", [1.0]) for quantity in (BRING, TAKE)]
    times = (*exposed, sum(exposed))
    rows += [Row(label, EXPOSED, "ms", [time]) for label, time in zip(("layer 2", "layer 1", ALL), times, strict=True)]
    assert said in exposure(Point(at={}, settings={}, rows=rows))
