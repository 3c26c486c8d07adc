"""Layers that sleep: which times they take where, and what they hand to a synchronisation."""

import pytest
import torch

from retime.foundations.measure import LayerTimes
from retime.recipes.emulated import SleepingLayer, sleeping, sleeping_copy


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Milliseconds asked for, in order; nobody really sleeps."""
    asked: list[float] = []
    monkeypatch.setattr(sleeping.time, "sleep", lambda seconds: asked.append(round(seconds * 1e3, 6)))
    return asked


def test_output_and_weight_gradients_sleep_in_nodes_of_their_own(slept: list[float]) -> None:
    layer = SleepingLayer(forward_ms=1, output_ms=2, weight_ms=3, elements=5)
    given = torch.ones(4, requires_grad=True)
    loss = layer(given).sum()
    assert slept == [1]
    torch.autograd.grad(loss, [given], retain_graph=True)
    assert slept == [1, 2]
    (gradient,) = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    assert slept == [1, 2, 3]
    assert gradient.tolist() == [4, 0, 0, 0, 0]
    loss.backward()
    assert sorted(slept[3:]) == [2, 3]


def test_the_first_layer_has_no_output_gradient_to_wait_for(slept: list[float]) -> None:
    network = torch.nn.Sequential(SleepingLayer(1, 2, 3, elements=5), SleepingLayer(10, 20, 30, elements=5))
    network(torch.ones(4)).sum().backward()
    assert slept[:2] == [1, 10]
    assert sorted(slept[2:]) == [3, 20, 30]


def test_a_copy_of_measured_layers_has_their_bytes_and_times() -> None:
    layers = [LayerTimes("linear", 1, 2, 3, 400), LayerTimes("relu", 0.5, 0.25, 0, 0), LayerTimes("head", 4, 5, 6, 80)]
    network = sleeping_copy(layers)
    assert [sum(p.numel() for p in layer.parameters()) for layer in network] == [100, 20]
    assert [layer.forward_ms for layer in network] == [1.5, 4]
    assert [layer.output_ms for layer in network] == [2.25, 5]
    assert sum(layer.weight_ms for layer in network) == 9


def test_a_layer_takes_no_negative_time() -> None:
    with pytest.raises(ValueError, match="output_ms=-1 is negative"):
        SleepingLayer(0, -1, 0, elements=1)
