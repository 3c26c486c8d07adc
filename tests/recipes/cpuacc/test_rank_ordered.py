"""The reference adds up in the order of the ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from retime.recipes.cpuacc.naive import rank_ordered


def test_gradients_are_divided_and_added_one_rank_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With these values another order gives other sums."""
    values = [torch.tensor([value]) for value in (1.0, 1e8, -1e8, 2.0)]

    def gathered(into: list[Tensor], mine: Tensor) -> None:
        assert mine.item() == 0.25
        for one, other in zip(into, values, strict=True):
            one.copy_(other / 4)

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather", gathered)
    buffer = values[0].clone()
    bucket: Any = SimpleNamespace(buffer=lambda: buffer)
    assert rank_ordered(None, bucket).wait() is buffer
    assert buffer.item() == 0.5
