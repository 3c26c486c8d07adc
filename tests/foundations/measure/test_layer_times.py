"""Times of layers: which layers, which of their three tasks, and whose bytes."""

import torch
from torch import nn

from retime.foundations.measure import layer_times, update_ms

WIDTH = 8
LINEAR_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def test_layers_are_timed_in_forward_order_with_their_bytes() -> None:
    embedding = nn.Embedding(10, WIDTH)
    network = nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    timed = layer_times(network, torch.zeros(3, dtype=torch.int64), repeats=1)
    assert [one.name for one in timed] == ["0", "1", "2", "3"]
    assert [one.bytes for one in timed] == [4 * 10 * WIDTH, LINEAR_BYTES, 0, LINEAR_BYTES]
    assert timed[0].output_ms == 0.0  # token numbers have no gradient
    assert timed[2].weight_ms == 0.0
    assert all(one.forward_ms > 0 for one in timed)
    assert update_ms(network, lambda parameters: torch.optim.SGD(parameters, lr=0.1), repeats=1) > 0
