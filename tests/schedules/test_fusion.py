"""Figure 1 of optimizer fusion: the orders, their depths, their times and their memory."""

import pytest

from retime.schedules import backward_fusion, baseline, forward_fusion, simulate, step_buffers, validate

PLANNERS = [baseline, backward_fusion, forward_fusion]


def test_figure_1_orders():
    assert str(baseline(3)) == "F1 F2 F3 O3 W3 O2 W2 W1 U1 U2 U3"
    assert str(backward_fusion(3)) == "F1 F2 F3 O3 W3 U3 O2 W2 U2 W1 U1"
    assert forward_fusion(4, steps=1) == baseline(4)
    assert str(forward_fusion(3)) == ("F1 F2 F3 O3 W3 O2 W2 W1 U1 F1' U2 F2' U3 F3' O3' W3' O2' W2' W1' U1' U2' U3'")


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_all_three_are_valid_orders_of_the_same_tasks(layers, steps):
    for planner in PLANNERS:
        schedule = planner(layers, steps=steps)
        validate(schedule)
        assert sorted(schedule) == sorted(baseline(layers, steps=steps))


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 19, 100])
def test_depths_of_section_3(layers):
    """With O and W as one node, as an eager framework runs them, an update waits for the last node, or for its own."""
    nodes, updates_aside = {"F": 1, "O": 0, "W": 1, "U": 1}, {"U": "update"}
    assert simulate(baseline(layers), nodes).makespan_ms == 3 * layers
    assert simulate(baseline(layers), nodes, updates_aside).makespan_ms == 3 * layers
    assert simulate(backward_fusion(layers), nodes, updates_aside).makespan_ms == 2 * layers + 1


def test_updates_beside_the_backward_pass_take_the_time_of_one():
    costs = {"F": 1, "O": 1, "W": 1, "U": 1}
    layers = 4
    apart = {"U": "update"}
    # F 4, O 3, W 4; the baseline's updates follow, backward fusion's but the last run beside
    assert simulate(baseline(layers), costs).makespan_ms == 15
    assert simulate(baseline(layers), costs, apart).makespan_ms == 15
    assert simulate(backward_fusion(layers), costs).makespan_ms == 15
    fused = simulate(backward_fusion(layers), costs, apart)
    assert fused.makespan_ms == 12
    assert fused.idle_ms == {"compute": 1, "update": 8}


def test_fusion_frees_gradients_early():
    """The baseline holds all weight gradients at its first update, backward fusion one, forward fusion all."""
    peaks = {
        planner.__name__: simulate(
            planner(4, steps=2),
            {"F": 1, "O": 1, "W": 1, "U": 1},
            buffers=step_buffers(planner(4, steps=2), weight_gradient_bytes=100),
        ).peak_bytes
        for planner in PLANNERS
    }
    assert peaks == {"baseline": 400, "backward_fusion": 100, "forward_fusion": 400}
