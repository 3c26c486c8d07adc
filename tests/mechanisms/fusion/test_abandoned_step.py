"""After an exception inside backward(), the error of the next one says how to go on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from retime import fuse_optimizer
from support.failing import FailsBackward


def test_the_next_backward_names_abandon_step() -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], 0.1)
    fusion = fuse_optimizer(nn.Sequential(first, last), optimizer, mode="backward", backward_passes=1)

    def step(fails: bool = False) -> None:
        optimizer.zero_grad()
        hidden = first(torch.ones(2, 3))
        last(FailsBackward.apply(hidden) if fails else hidden).sum().backward()
        optimizer.step()

    step()
    with pytest.raises(ArithmeticError):
        step(fails=True)
    with pytest.raises(RuntimeError, match=r"after an exception inside a backward\(\), call `fusion.abandon_step\(\)`"):
        step()
    fusion.abandon_step()
    step()
    assert fusion.report().steps == 2
