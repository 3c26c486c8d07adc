"""What tasks of pipelines take: in the first batch, whole on one rank, and in the first steps."""

import pytest
import torch
from torch import nn

from retime.mechanisms.pipeline import Costs, Planner
from retime.mechanisms.pipeline import layers as layers_module
from retime.mechanisms.pipeline.calls import LayerInterceptors
from retime.mechanisms.pipeline.layers import group_equal_layers, group_medians, profile_layers
from retime.mechanisms.pipeline.stage import MeasuredTimes, Span
from retime.schedules import Kind, Task
from retime.schedules.pipeline import Placement, StageCosts, simulate_pipeline
from retime.schedules.pipeline.placement import rank_schedule

HOP_MS = 0.25


class Clock:
    """Seconds that only pass when a gradient is computed."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Takes(torch.autograd.Function):
    """Its gradient takes a while."""

    @staticmethod
    def forward(ctx, tensor, clock, took_ms):
        ctx.clock, ctx.took_ms = clock, took_ms
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.took_ms / 1000
        return gradient, None, None


class Layer(nn.Module):
    """Its output gradient takes ``output_ms``, its weight gradient ``weight_ms``."""

    def __init__(self, clock, output_ms, weight_ms, size=3):
        super().__init__()
        self.clock, self.output_ms, self.weight_ms = clock, output_ms, weight_ms
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, tensor):
        weight = Takes.apply(self.weight, self.clock, self.weight_ms)
        return Takes.apply(tensor, self.clock, self.output_ms) * weight.sum()


def profiled(monkeypatch, layers, clock, before=None, behind=None):
    monkeypatch.setattr(layers_module, "now", clock)
    model = nn.Sequential(*layers)
    whole = nn.ModuleList([one for one in (before, model, behind) if one is not None])
    gates = LayerInterceptors(list(model))

    def step():
        tensor = torch.ones(2, 3) if before is None else before(torch.ones(2, 3))
        tensor = model(tensor)
        return (tensor if behind is None else behind(tensor)).sum()

    try:
        return profile_layers(step, whole, gates, list(model), [str(number) for number in range(len(layers))])
    finally:
        gates.remove()
        assert all(parameter.grad is None for parameter in whole.parameters())


def test_gradients_of_each_layer_in_the_first_batch(monkeypatch):
    clock = Clock()
    layers = [Layer(clock, 2, 5, size=3), Layer(clock, 4, 7, size=2), Layer(clock, 6, 1, size=1)]
    measured = profiled(monkeypatch, layers, clock, Layer(clock, 8, 16, size=5), Layer(clock, 32, 64, size=4))
    assert measured.output_gradient_ms == pytest.approx([2, 4, 6 + 32])
    # in front of the layers nothing is sent on: the weight gradient there belongs to the first layer
    assert measured.weight_gradient_ms == pytest.approx([5 + 16, 7, 1 + 64])


def test_what_goes_in_first_needs_no_gradient(monkeypatch):
    clock = Clock()
    measured = profiled(monkeypatch, [Layer(clock, 2, 5), Layer(clock, 4, 7, size=2)], clock)
    assert measured.output_gradient_ms == pytest.approx([0, 4])
    assert measured.weight_gradient_ms == pytest.approx([5, 7])


def test_of_layers_that_are_alike_one_computes_its_weight_gradient(monkeypatch):
    clock = Clock()
    layers = [Layer(clock, 2, 5) for _ in range(4)]
    measured = profiled(monkeypatch, layers, clock, Layer(clock, 0, 1, size=1))
    assert measured.output_gradient_ms == pytest.approx([2] * 4)
    assert measured.weight_gradient_ms == pytest.approx([6, 5, 5, 5])
    # per pass: gradients of 4 inputs; twice with the weight gradients of one layer and of what lies in front
    assert clock.now * 1000 == pytest.approx(4 * 4 * 2 + 2 * (5 + 1))


def test_a_graph_that_allows_no_such_passes_is_left_alone(monkeypatch):
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("not here")

    class Refusing(Layer):
        def forward(self, tensor):
            return Refuses.apply(super().forward(tensor))

    clock = Clock()
    measured = profiled(monkeypatch, [Layer(clock, 2, 5), Refusing(clock, 2, 5)], clock)
    assert measured.output_gradient_ms == measured.weight_gradient_ms == []


def test_layers_that_are_alike():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(3, 3)]
    given = [[torch.ones(2, 3)]] * 3 + [[torch.ones(5, 3)]]
    groups = group_equal_layers(layers, given)
    assert groups == [[0, 1], [2], [3]]
    assert group_medians([1.0, 3.0, 5.0, 7.0], groups) == [2.0, 2.0, 5.0, 7.0]


def span(kind, stage, took_ms):
    return Span(kind, stage, 0, 1.0, 1.0 + took_ms / 1000)


def test_the_first_step_does_not_count():
    times = MeasuredTimes()
    done = [
        times.note(
            [span("F", 0, took), span("O", 0, 2 * took), span("W", 0, 3 * took), span("F", 1, 1), span("B", 1, 8)]
        )
        for took in (100, 1, 2, 3, 50)
    ]
    assert done == [False, False, False, True, False]
    by_stage = times.by_stage({1: 0.25})
    assert by_stage[0] == pytest.approx((2, 4, 6))
    assert by_stage[1] == pytest.approx((1, 6, 2))


def ran(plan, times):
    """Milliseconds of a plan's order with these times."""
    kinds = {"F": (Kind.F,), "O": (Kind.O,), "W": (Kind.W,), "B": (Kind.O, Kind.W)}
    lanes = [
        [Task(one, stage + 1, batch) for kind, stage, batch in order for one in kinds[kind]]
        for _, order in sorted(plan.orders.items())
    ]
    costs = StageCosts(*zip(*(times[stage] for stage in range(plan.stages)), strict=True))
    return simulate_pipeline(rank_schedule(lanes), Placement(plan.rank_of), costs, hops=HOP_MS).makespan_ms


@pytest.mark.parametrize("schedule", ["ooo2", "ooo_v", "ooo1", "ooo"])
def test_orders_fit_what_tasks_take(schedule):
    """Stages stay where they are, and the order is no longer than the old one would be."""
    planner = Planner(schedule, 2, Costs((1.0,) * 8, (1,) * 8, HOP_MS))
    first = planner.plan(4)
    times = {stage: (1.0 + stage % 3, 4.0, 0.5) for stage in range(first.stages)}
    planner.know(times)
    again = planner.plan(4)
    assert (again.name, again.stage_of, again.rank_of) == (first.name, first.stage_of, first.rank_of)
    assert again.makespan_ms == pytest.approx(ran(again, times))
    assert again.makespan_ms <= ran(first, times)
    assert planner.plan(2).rank_of == first.rank_of


def test_another_order_is_shorter_where_times_differ():
    planner = Planner("ooo2", 2, Costs((20.0,) * 8, (1,) * 8, HOP_MS))
    first = planner.plan(4)
    times = dict.fromkeys(range(first.stages), (60.0, 20.0, 20.0))
    planner.know(times)
    assert planner.plan(4).makespan_ms < 0.99 * ran(first, times)


def test_the_share_of_weight_gradients_is_that_of_the_first_batch():
    costs = Costs((1.0,) * 4, (1,) * 4, 0.0, 0.0, (3.0,) * 4, (1.0,) * 4)
    planner = Planner("ooo1", 2, costs)
    assert planner.plan(2).stages == 2
    assert planner.weight_share(0) == 0.25
