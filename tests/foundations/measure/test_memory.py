"""The peak of a process survives that others measure phases of it."""

import os
from pathlib import Path

import pytest
import torch

from retime.foundations.measure import MemoryProbe, forget_peak, peak_so_far, status_bytes
from retime.foundations.measure import memory as process_peak

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
