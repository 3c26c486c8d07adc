"""Data-parallel steps against timelines made by hand, and against the lane simulator where its model suffices."""

import math

import pytest

from retime.schedules import (
    Bucket,
    Cluster,
    Communication,
    LayerCost,
    Link,
    Transfer,
    backward_to_forward,
    layer_buckets,
    reverse_first_k,
    simulate,
    simulate_data_parallel,
    size_buckets,
)


def a_byte_a_millisecond(size_bytes):
    return Transfer(0.0, size_bytes)


def step(costs, k=0, **options):
    buckets = options.pop("buckets", None) or layer_buckets(costs)
    transfer = options.pop("transfer", a_byte_a_millisecond)
    return simulate_data_parallel(costs, Communication(buckets, transfer, **options), k=k)


def boxes(timeline):
    """Start and end of the first step's boxes, from the start of its backward pass."""
    zero = next(span.start_ms for span in timeline.spans if span.name == "W3")
    return {span.name: (span.start_ms - zero, span.end_ms - zero) for span in timeline.spans}


UNITS = [LayerCost(2, 1, 1, 3)] * 5
LOSS = LayerCost(2, 1, 0, 0)


@pytest.mark.parametrize("k", range(6))
def test_first_in_first_out_is_what_two_lanes_do(k):
    costs = [*UNITS, LOSS]
    schedule = backward_to_forward(reverse_first_k(6, k, steps=2, without_weights={6}))
    lanes = simulate(schedule, {"F": 2, "O": 1, "W": 1, "S": 3}, {"S": "network"})
    simulated = step(costs, k)
    assert simulated.step_ms == pytest.approx(lanes.makespan_ms)
    assert simulated.idle_ms == pytest.approx(lanes.idle_ms["compute"])
    assert simulated.busy_ms == pytest.approx(15)
    assert simulated.compute_ms == pytest.approx(22)


def test_every_step_is_alike():
    how = Communication(layer_buckets(UNITS), a_byte_a_millisecond, order="priority", partition_bytes=1)
    ran = [simulate_data_parallel(UNITS, how, k=2, steps=steps) for steps in (2, 3, 5)]
    assert [one.step_ms for one in ran] == pytest.approx([ran[0].step_ms] * 3)
    assert [sum(span.lane == "network" for span in one.spans) for one in ran] == [30, 45, 75]  # of the last step too


THREE = [LayerCost(1, 1, 1, 2), LayerCost(1, 1, 1, 2), LayerCost(1, 1, 1, 6)]


def test_priority_waits_for_the_message_on_its_way():
    """W3 0-1, O3 1-2, W2 2-3, O2 3-4, W1 4-5: S3 holds the link until 7, then layer 1 overtakes layer 2."""
    timeline = step(THREE, order="priority")
    drawn = boxes(timeline)
    assert (drawn["S3"], drawn["S1"], drawn["S2"]) == ((1, 7), (7, 9), (9, 11))
    assert timeline.step_ms == pytest.approx(5 + 3 + 5)  # F1 at 9, F2 at 11, F3 at 12
    assert step(THREE).step_ms == pytest.approx(14)  # S2 7-9, S1 9-11, F1 at 11


def test_partitions_let_the_urgent_ones_through():
    """S3 1-3, S2 3-5, S1 5-7, the rest of S3 7-11: F1 at 7, F2, F3 waits until 11."""
    timeline = step(THREE, order="priority", partition_bytes=1)
    assert timeline.step_ms == pytest.approx(12)
    assert timeline.idle_ms == pytest.approx(2 + 2)
    assert timeline.busy_ms == pytest.approx(10)


def test_queues_share_the_link():
    """With k = 2: S3 alone 1-4, S1 and S3 at half speed 4-8, the last of S3 8-9."""
    costs = [LayerCost(1, 0, 1, 2), LayerCost(1, 1, 1, 0), LayerCost(1, 1, 1, 6)]
    buckets = [Bucket((3,)), Bucket((1,), "first k")]
    timeline = step(costs, 2, buckets=buckets)
    drawn = boxes(timeline)
    assert (drawn["W1"], drawn["S1"], drawn["S3"]) == ((3, 4), (4, 8), (1, 9))
    assert timeline.step_ms == pytest.approx(8 + 2 + 1)
    assert step(costs, 2, buckets=[Bucket((3,)), Bucket((1,))]).step_ms == pytest.approx(9 + 3)


def test_without_cross_iteration_the_first_forward_waits_for_all():
    assert step(THREE, cross_iteration=False).step_ms == pytest.approx(11 + 3)
    assert step(THREE, order="priority", cross_iteration=False).step_ms == pytest.approx(11 + 3)
    assert step(THREE, 3, order="priority").step_ms < step(THREE, 3, order="priority", cross_iteration=False).step_ms


def test_a_bucket_travels_when_its_last_gradient_is_made():
    timeline = step(THREE, buckets=[Bucket((3, 2)), Bucket((1,))])
    assert boxes(timeline)["S3+S2"] == (3, 11)
    assert timeline.step_ms == pytest.approx(13 + 3)


def test_latency_leaves_the_link_to_others():
    costs = [LayerCost(0, 0, 0, 4), LayerCost(0, 0, 0, 4)]
    late = {"transfer": lambda size_bytes: Transfer(3.0, size_bytes)}
    assert step(costs, **late).step_ms == pytest.approx(14)
    assert step(costs, buckets=[Bucket((1,)), Bucket((2,), "other")], **late).step_ms == pytest.approx(11)


def test_interference_slows_computation_while_the_link_is_busy():
    costs = [LayerCost(0, 0, 4, 3), LayerCost(0, 0, 4, 2)]
    # W2 0-4, S2 4-6, W1 gets 1 of its 4 ms done until 6 and ends at 9, S1 9-12
    assert step(costs, interference=0.5).step_ms == pytest.approx(12)
    assert step(costs).step_ms == pytest.approx(11)


def test_one_device_has_nothing_to_send():
    alone = Cluster(1, 1, Link(1e9, 1.0))
    timeline = step(THREE, transfer=alone.all_reduce)
    assert timeline.step_ms == pytest.approx(timeline.compute_ms) == pytest.approx(8)
    assert timeline.idle_ms == 0


def test_ring_all_reduce():
    link = Link(8e9, 0.5)  # a byte takes a nanosecond
    assert link.transfer_ms(1e6) == pytest.approx(1.0)
    four = Cluster(4, 1, link).all_reduce(1e6)
    assert (four.latency_ms, four.busy_ms) == pytest.approx((3.0, 1.5))
    two_by_two = Cluster(2, 2, link, Link(80e9, 0.01)).all_reduce(1e6)
    assert (two_by_two.latency_ms, two_by_two.busy_ms) == pytest.approx((1.02, 1.0 + 0.1))
    assert Cluster(12, 4, link).devices == 48


def test_parameter_servers_send_as_much_in_two_messages():
    link = Link(8e9, 0.5)
    four = Cluster(4, 1, link).push_pull(1e6)
    assert (four.latency_ms, four.busy_ms) == pytest.approx((1.0, 1.5))
    assert Cluster(1, 1, link).push_pull(1e6) == Transfer(0.0, 0.0)


def test_buckets_fill_from_the_last_layer_and_the_first_k_apart():
    costs = [LayerCost(1, 1, 1, size_bytes) for size_bytes in (1, 2, 0, 4, 8)]
    assert layer_buckets(costs) == [Bucket((1,)), Bucket((2,)), Bucket((4,)), Bucket((5,))]
    assert size_buckets(costs, 10) == [Bucket((5, 4)), Bucket((2, 1))]
    assert size_buckets(costs, 10, first_bytes=1) == [Bucket((5,)), Bucket((4, 2, 1))]
    assert size_buckets(costs, 10, k=2) == [Bucket((5, 4)), Bucket((1, 2), "first k")]
    assert size_buckets(costs, 10, k=1) == size_buckets(costs, 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerCost(-1, 0, 0, 0), "forward_ms=-1: give a finite number"),
        (lambda: LayerCost(math.nan, 0, 0, 0), "forward_ms=nan"),
        (lambda: Link(0), "bits_per_s=0: give more than 0"),
        (lambda: Link(1, -1), "latency_ms=-1"),
        (lambda: step(THREE, interference=1.0), "interference=1.0: give 0 or more, below 1"),
        (lambda: step(THREE, 4), "k=4: give 0 .* to 3, the number of layers"),
        (lambda: size_buckets(THREE, 10, k=4), "k=4: give 0"),
        (lambda: Transfer(0, -1.0), "busy_ms=.*: give a finite number of milliseconds"),
        (lambda: Transfer(0, math.nan), "busy_ms=.*: give a finite number of milliseconds"),
        (lambda: Transfer(0, math.inf), "busy_ms=.*: give a finite number of milliseconds"),
        (lambda: step(THREE, buckets=[*layer_buckets(THREE), Bucket(())]), "put each into one, and none empty"),
        (
            lambda: step(THREE, buckets=[Bucket((1, 2))]),
            r"hold the layers \[1, 2\], those with parameters are \[1, 2, 3\]",
        ),
        (
            lambda: simulate_data_parallel(THREE, Communication(layer_buckets(THREE), a_byte_a_millisecond), steps=1),
            "steps=1: give 2 or more",
        ),
    ],
)
def test_wrong_numbers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
