"""Accumulation on the processors in an Accelerate loop."""

import sys

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import CPUAccumulate, FusedOptimizer
from support.ranks import on_ranks

STEPS = 6


def loop(way: str) -> tuple[list[Tensor], str]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    adds = CPUAccumulate(accelerator, model) if way != "plain" else None
    fusion = FusedOptimizer(accelerator, model, optimizer, mode="forward") if way == "fused" else None
    if adds is not None:
        with pytest.raises(ValueError, match="this model has one already"):
            CPUAccumulate(accelerator, model)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 32, generator=generator)).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    if fusion is not None:
        fusion.remove()
    report = ""
    if adds is not None:
        adds.remove()
        adds.remove()
        report = str(adds.report())
    return [parameter.detach().clone() for parameter in net.parameters()], report


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@on_ranks(2, joined=False)
def test_a_loop_on_two_ranks_has_the_same_bits() -> None:
    expected, _ = loop("plain")
    for way in ("host", "fused"):
        ours, report = loop(way)
        assert all(map(torch.equal, expected, ours)), way
        assert "3 buckets" in report, report
        assert "2 ranks in shared memory" in report, report


def test_one_process_is_left_as_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.warns(NoEffectWarning, match="no gradients to add up"):
        adds = CPUAccumulate(accelerator, accelerator.prepare(nn.Linear(2, 2)))
    assert adds.report().headline == "gradients on the host: none were summed"
    adds.remove()
