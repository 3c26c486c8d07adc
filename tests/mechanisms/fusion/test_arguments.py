"""Numbers given to optimizer fusion: what cannot be meant is refused by name, and bytes may be written as people do."""

import math
from typing import Any

import pytest
import torch

import retime
from retime.mechanisms.fusion import BackwardFusion, ForwardFusion
from support.fusion import network

WRONG: dict[str, tuple[Any, ...]] = {
    "bucket_bytes": (0, -1, True, 1.5, math.nan, math.inf, "lots", "-1MiB", [1]),
    "clip_value": (0, -1.0, -math.inf, math.nan, True, "1"),
    "backward_passes": (0, -1, True, 1.5, math.nan, "2"),
    "side_stream": (1, "yes"),
    "mode": ("sideways", 7),
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_what_cannot_be_meant_is_refused_by_name(name: str, value: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((TypeError, ValueError), match=f"{name}|mode"):
        retime.fuse_optimizer(model, optimizer, **{name: value})
    if name != "mode":
        with pytest.raises((TypeError, ValueError), match=name):
            BackwardFusion(optimizer, **{name: value})
    if name == "bucket_bytes":
        for make in (lambda **options: ForwardFusion(optimizer, model, **options), retime.FuseOptimizer):
            with pytest.raises((TypeError, ValueError), match=name):
                make(**{name: value})
    if name in ("bucket_bytes", "mode"):
        for strategy in (retime.FusedOptimizerStrategy, retime.FusedOptimizerDDPStrategy):
            with pytest.raises((TypeError, ValueError), match=name):
                strategy(**{name: value})


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_bytes_may_have_a_unit(mode: str) -> None:
    model = network()
    fusion = retime.fuse_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), mode, bucket_bytes="1MiB")
    assert fusion.bucket_bytes == 2**20
    fusion.remove()
