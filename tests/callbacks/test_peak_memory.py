"""PeakMemory and the probe below it."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

import retime.foundations.measure.memory as process_peak
from retime.callbacks.peak_memory import PeakMemory
from retime.foundations.measure.memory import MemoryProbe
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = IGNORED_WARNINGS

MIB = 2**20
NAMES = {f"{phase}_peak_bytes" for phase in ("forward", "backward", "update", "batch")}


def allocate(mebibytes: int) -> None:
    """Touch that much memory and give it back; large enough for the C library to map and unmap it."""
    torch.ones(mebibytes * MIB, dtype=torch.uint8)


class Hungry(LightningModule):
    """Needs 96 MiB for a moment in the phase that is asked for."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.where = where

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.where == "forward":
            allocate(96)
        return self.net(batch).square().mean()

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.where == "backward":
            allocate(96)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "update":
            allocate(96)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(callbacks: list[Callback], model: LightningModule, batches: int = 4, **options: Any) -> Trainer:
    trainer = quiet_trainer(**{"max_epochs": 1, **options}, callbacks=callbacks)
    trainer.fit(model, DataLoader(torch.ones(batches * 2, 4), batch_size=2))  # type: ignore[arg-type]
    return trainer


@pytest.fixture(params=["VmHWM", "sampled rss"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Both ways of asking for the process's peak."""
    if request.param == "sampled rss":
        monkeypatch.setattr(process_peak, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    elif MemoryProbe().source != "VmHWM":
        pytest.skip(f"this kernel has no resettable peak: {MemoryProbe().note}")
    return str(request.param)


def test_probe_in_a_bare_loop(source: str) -> None:
    probe = MemoryProbe()
    assert probe.source == source
    assert bool(probe.note) == (source == "sampled rss")
    probe.start()
    probe.switch("forward")
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    probe.switch("backward")
    del tensor
    probe.switch("update")
    probe.stop()
    probe.stop()
    peaks = probe.peaks()
    assert list(peaks) == ["forward", "backward", "update", "batch"]
    assert peaks["backward"] > peaks["update"] + 48 * MIB  # the tensor is still there when the backward begins
    assert peaks["batch"] == max(peaks["forward"], peaks["backward"])


def test_probe_says_why_it_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_peak, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    assert "cannot be reset" in MemoryProbe().note
    ignored = tmp_path / "clear_refs"
    monkeypatch.setattr(process_peak, "CLEAR_REFS", ignored)  # takes the write, and nothing happens
    monkeypatch.setattr(process_peak, "_noted", {})  # of what follows
    status = tmp_path / "status"
    status.write_text("VmHWM:\t  999999 kB\nVmRSS:\t  1000 kB\n")
    monkeypatch.setattr(process_peak, "STATUS", status)
    assert "VmHWM stayed 1022974976 bytes above" in MemoryProbe().note
    status.write_text("VmSize:\t  1000 kB\n")
    assert "has no VmHWM" in MemoryProbe().note


def test_cuda_peaks_come_from_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[Any] = []
    answers = iter([5, 10, 40, 30, 20])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(process_peak, "_noted", {})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(answers))
    probe = MemoryProbe("cuda:1")
    probe.start()
    for phase in ("forward", "backward", "update"):
        probe.switch(phase)
    probe.stop()
    assert probe.peaks() == {"forward": 40, "backward": 30, "update": 20, "batch": 40}
    assert resets == [torch.device("cuda:1")] * 5
    assert probe.source == "cuda allocator"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peaks_on_a_device() -> None:
    probe = MemoryProbe("cuda")
    before = torch.cuda.memory_allocated()
    probe.start()
    probe.switch("forward")
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    probe.switch("backward")
    probe.stop()
    assert probe.peaks()["forward"] == probe.peaks()["batch"] == before + 64 * MIB
    assert probe.peaks()["backward"] == before


@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_the_hungry_phase_has_the_peak(where: str) -> None:
    memory = PeakMemory()
    if MemoryProbe().source != "VmHWM":
        pytest.skip("sampling may miss a short peak")
    fit([memory], Hungry(where))
    assert [peak["step"] for peak in memory.peaks] == [0, 1, 2, 3]
    for peaks in memory.peaks:
        others = NAMES - {f"{where}_peak_bytes", "batch_peak_bytes"}
        assert peaks[f"{where}_peak_bytes"] == peaks["batch_peak_bytes"]
        assert all(peaks[other] < peaks["batch_peak_bytes"] - 64 * MIB for other in others)
    report = memory.report()
    assert report["steps"] == 4
    assert report["source"] == "VmHWM"
    assert report["note"] == ""
    assert report["batch_peak_bytes"] == max(peaks["batch_peak_bytes"] for peaks in memory.peaks)


def test_logs_every_nth_step_and_only_its_own_keys(source: str, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    memory = PeakMemory(every_n_steps=3)
    trainer = fit([memory], Hungry(), logger=logger, log_every_n_steps=100)
    assert [set(peaks) for peaks in memory.peaks] == [NAMES | {"step"}] * 2
    assert [peaks["step"] for peaks in memory.peaks] == [0, 3]
    keys = {f"memory/{name}" for name in NAMES}
    assert set(trainer.callback_metrics) == keys
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "3"]
    for row, peaks in zip(rows, memory.peaks, strict=True):
        assert {key: int(float(row[key])) for key in keys} == {f"memory/{name}": peaks[name] for name in NAMES}


def test_accumulation_counts_as_one_step_and_silence_is_kept() -> None:
    memory = PeakMemory(log=False)
    trainer = fit([memory], Hungry(), batches=5, accumulate_grad_batches=2)
    assert [peaks["step"] for peaks in memory.peaks] == [0, 1, 2]
    assert not trainer.callback_metrics


def test_weights_are_bit_identical_and_the_strategy_is_left_as_found(source: str) -> None:
    reference, measured = Hungry(), Hungry()
    fit([], reference)
    trainer = fit([PeakMemory()], measured)
    assert torch.equal(reference.net.weight, measured.net.weight)
    assert torch.equal(reference.net.bias, measured.net.bias)
    assert not {"training_step", "backward", "optimizer_step"} & set(vars(trainer.strategy))


def test_nothing_measured_reports_nothing() -> None:
    assert PeakMemory().report() == {"steps": 0, "source": None, "note": ""}
