"""The stop-watch below StepTimeline, in bare loops; and what it and the probe below PeakMemory refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from retime.foundations.measure.memory import MemoryProbe
from retime.foundations.measure.timing import EXPOSED, StepTimer
from retime.mechanisms.fusion import fuse_optimizer
from support.step_timings import assert_consistent, count


def train_bare(timer: StepTimer, net: nn.Module) -> None:
    timer.start()
    timer.switch("forward")
    loss = net(torch.ones(2, 4)).sum()
    timer.switch("backward")
    loss.backward()
    timer.switch("update")
    timer.stop()


def test_timer_in_a_bare_loop() -> None:
    timer = StepTimer()
    train_bare(timer, nn.Linear(4, 1))
    timing = timer.timing()
    assert count(timing) == {"forward": 1, "backward": 1, "update": 1}
    assert timing.communication_exposed_ms == 0
    assert timing.clock == "host clock"
    assert_consistent(timing)


def test_timer_finds_the_end_of_the_last_gradient() -> None:
    net = nn.Linear(4, 1)
    net.bias.requires_grad_(False)
    timer = StepTimer(parameters=net.parameters())
    train_bare(timer, net)
    train_bare(timer, net)
    timing = timer.timing()
    assert count(timing) == {"forward": 2, "backward": 2, "update": 2, EXPOSED: 2}
    assert_consistent(timing)
    assert not net.weight._backward_hooks


def test_timer_does_not_guess_exposed_communication() -> None:
    timer = StepTimer(parameters=[])
    train_bare(timer, nn.Linear(4, 1))
    assert timer.timing().communication_exposed_ms is None
    assert "communication_exposed_ms" not in timer.timing().metrics()


def test_timer_does_not_stop_backward_fusion() -> None:
    def late_updates(watched: bool) -> int:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        fusion = fuse_optimizer(net, torch.optim.SGD(net.parameters(), lr=0.1), bucket_bytes=1)
        timer = StepTimer(parameters=net.parameters() if watched else None)
        for _ in range(3):
            train_bare(timer, net)
            fusion.optimizer.step()
            fusion.optimizer.zero_grad()
        assert fusion.report().fused_updates > 0
        return fusion.report().late_updates

    assert late_updates(watched=True) == late_updates(watched=False)


@pytest.mark.parametrize(("make", "ask"), [(StepTimer, StepTimer.timing), (MemoryProbe, MemoryProbe.peaks)])
def test_misuse_is_refused(make: Any, ask: Any) -> None:
    timer = make()
    with pytest.raises(RuntimeError, match="call start"):
        timer.switch("forward")
    with pytest.raises(RuntimeError, match="nothing to report"):
        ask(timer)
    timer.start()
    with pytest.raises(RuntimeError, match="called twice"):
        timer.start()
    with pytest.raises(ValueError, match=r"'sideways': use one of forward, backward, update, other"):
        timer.switch("sideways")
    timer.stop()
    timer.stop()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_events_on_a_device() -> None:
    net = nn.Linear(4, 1).cuda()
    timer = StepTimer("cuda", parameters=net.parameters())
    timer.start()
    timer.switch("forward")
    loss = net(torch.ones(2, 4, device="cuda")).sum()
    timer.switch("backward")
    loss.backward()
    timer.stop()
    assert count(timer.timing()) == {"forward": 1, "backward": 1, EXPOSED: 1}
    assert_consistent(timer.timing())
