"""Counts and sizes that planners are given: whole numbers in their range, or an error that names the argument."""

import math

import pytest

from retime import schedules as s

COSTS = [s.LayerCost(1, 1, 1, 10)] * 3
TAKES = {
    "layers": [
        s.baseline,
        s.backward_fusion,
        s.forward_fusion,
        lambda v: s.reverse_first_k(v, 1),
        lambda v: s.largest_k(v, 10),
        s.KSearch,
    ],
    "steps": [
        lambda v: s.baseline(3, steps=v),
        lambda v: s.backward_fusion(3, steps=v),
        lambda v: s.forward_fusion(3, steps=v),
        lambda v: s.reverse_first_k(3, 0, steps=v),
        lambda v: s.simulate_data_parallel(COSTS, s.Communication(s.layer_buckets(COSTS), _message), steps=v),
    ],
    "k": [lambda v: s.reverse_first_k(3, v), lambda v: s.size_buckets(COSTS, 10, k=v)],
    "max_memory": [lambda v: s.largest_k(3, v)],
    "bucket_bytes": [lambda v: s.size_buckets(COSTS, v)],
    "first_bytes": [lambda v: s.size_buckets(COSTS, 10, first_bytes=v)],
    "largest": [lambda v: s.KSearch(3, largest=v)],
    "budget": [lambda v: s.KSearch(3, budget=v)],
    "nodes": [lambda v: s.Cluster(v, 1, s.Link(1e9))],
    "devices_per_node": [lambda v: s.Cluster(1, v, s.Link(1e9))],
    "partition_bytes": [
        lambda v: s.simulate_data_parallel(
            COSTS, s.Communication(s.layer_buckets(COSTS), _message, partition_bytes=v), k=1
        )
    ],
}
MAY_BE_0 = ("k", "largest", "first_bytes", "max_memory")


def _message(size_bytes: float) -> s.Transfer:
    return s.Transfer(0, 1)


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("value", [-1, 0, math.nan, 1.5, True, "2"])
def test_a_count_is_a_whole_number_in_its_range(name, value):
    for take in TAKES[name] if value != 0 or name not in MAY_BE_0 else ():
        with pytest.raises((TypeError, ValueError), match=f"^{name}={value!r}: give "):
            take(value)


def test_a_k_of_more_than_all_layers_is_refused():
    with pytest.raises(ValueError, match="k=4: give 0"):
        s.size_buckets(COSTS, 10, k=4)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_message_takes_a_finite_time(value):
    with pytest.raises(ValueError, match=r"busy_ms=.*: give a finite number of milliseconds"):
        s.Transfer(0, value)
