"""The stop-watch below StepTimeline, the probe below PeakMemory, what they refuse, and times of layers."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from retime.foundations.measure import MemoryProbe, forget_peak, layer_times, peak_so_far, status_bytes, update_ms
from retime.foundations.measure import memory as process_peak
from retime.foundations.measure.timing import EXPOSED, StepTimer
from retime.mechanisms.fusion import fuse_optimizer
from support.step_timings import assert_consistent, count


def train_bare(timer: StepTimer, net: nn.Module) -> None:
    timer.start()
    timer.switch("forward")
    loss = net(torch.ones(2, 4).to(next(net.parameters()).device)).sum()
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


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_timer_finds_the_end_of_the_last_gradient(device: str) -> None:
    net = nn.Linear(4, 1).to(device)
    net.bias.requires_grad_(False)
    timer = StepTimer(device, parameters=net.parameters())
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


MIB = 2**20

needs_resets = pytest.mark.skipif(MemoryProbe().source != "VmHWM", reason=MemoryProbe().note)


@needs_resets
def test_the_peak_outlives_a_probe() -> None:
    tensor = torch.ones(128 * MIB, dtype=torch.uint8)
    peak = status_bytes("VmRSS")
    del tensor
    probe = MemoryProbe()
    probe.start()
    probe.switch("forward")
    probe.stop()
    assert status_bytes("VmHWM") < peak - 64 * MIB  # the kernel has forgotten
    assert peak_so_far() >= peak - 16 * MIB  # the kernel adds its counts up late


@needs_resets
def test_a_child_has_a_peak_of_its_own() -> None:
    tensor = torch.ones(128 * MIB, dtype=torch.uint8)
    peak = status_bytes("VmRSS")
    del tensor
    forget_peak()
    child = os.fork()
    if not child:
        os._exit(peak_so_far() >= peak - 32 * MIB)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_cuda_peaks_are_noted_before_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:1")
    peaks = [50, 7]
    monkeypatch.setattr(process_peak, "_noted", {})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.pop(0))
    forget_peak(device)
    assert peak_so_far(device) == 50
    assert peak_so_far(torch.device("cuda:0")) == 7


def test_without_linux_there_is_the_systems_own_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_peak, "STATUS", tmp_path / "missing")
    assert peak_so_far() > MIB


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
