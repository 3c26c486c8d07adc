"""Energy of a stretch of work, from the meters that a machine has.

    meter = find_meter("cpu")          # NVML for CUDA devices, RAPL's counters for the processor
    with meter.watching() as watch:
        train()
    print(watch.joules, watch.seconds, watch.mean_watts, watch.max_watts)

Where there is no meter, :func:`find_meter` says so and why: an energy is measured or not known, never made up.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")
_EVERY_S = 0.05


class NoMeterError(RuntimeError):
    """This machine has no meter of energy that can be read; the message says which was looked for."""


@dataclass
class Watch:
    """What a meter saw.

    Attributes:
        joules: used meanwhile by all that the meter covers.
        seconds: how long it was watched.
        samples: power between two readings, in watts.
    """

    joules: float = 0.0
    seconds: float = 0.0
    samples: list[float] = field(default_factory=list)

    def add(self, seconds: float, joules: float, least_s: float = 0.0) -> None:
        """What was used since the reading before; of less than ``least_s`` no power is kept, it would be chance."""
        self.seconds += seconds
        self.joules += joules
        if seconds > least_s:
            self.samples.append(joules / seconds)

    @property
    def mean_watts(self) -> float:
        return self.joules / self.seconds if self.seconds else 0.0

    @property
    def max_watts(self) -> float:
        return max(self.samples, default=self.mean_watts)


class EnergyMeter:
    """Reads a counter of energy at the ends and every so often between them.

    Args:
        read_joules: what was used since some moment; never falls.
        source: what the counter covers, in words.
        every_s: seconds between two readings.
        clock: seconds.
    """

    def __init__(
        self,
        read_joules: Callable[[], float],
        source: str,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source = source
        self._read, self._every_s, self._clock = read_joules, every_s, clock

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Watch what the block uses; the watch is complete when the block has ended."""
        watch, done = Watch(), threading.Event()
        last = (self._clock(), self._read())

        def take() -> None:
            nonlocal last
            now = (self._clock(), self._read())
            watch.add(now[0] - last[0], now[1] - last[1], self._every_s / 2)
            last = now

        def sample() -> None:
            while not done.wait(self._every_s):
                take()

        thread = threading.Thread(target=sample, name="retime-energy-meter", daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            done.set()
            thread.join()
            take()


class RaplCounter:
    """Joules of all processor packages, from the kernel's powercap folder; counters that begin again are followed.

    Args:
        folder: its ``intel-rapl:N`` folders are packages; what is inside them (``intel-rapl:0:1``) is a part of one.

    Raises:
        NoMeterError: there is no package, or its counter may not be read.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._packages = sorted(path for path in folder.glob("intel-rapl:*") if path.name.count(":") == 1)
        if not self._packages:
            raise NoMeterError(f"{folder} has no intel-rapl package: this processor, or this virtual machine, has none")
        try:
            self._ranges = [int((path / "max_energy_range_uj").read_text()) for path in self._packages]
            self._last = self._counters()
        except OSError as error:
            raise NoMeterError(
                f"RAPL's counters cannot be read ({error}): run as root, or allow reading them"
            ) from None
        self._joules = 0.0

    def __call__(self) -> float:
        """Joules since this object was made; to be called at least once a round of the counters (minutes)."""
        now = self._counters()
        for new, old, span in zip(now, self._last, self._ranges, strict=True):
            self._joules += ((new - old) if new >= old else (new - old + span)) / 1e6
        self._last = now
        return self._joules

    def _counters(self) -> list[int]:
        return [int((path / "energy_uj").read_text()) for path in self._packages]


def find_meter(device: torch.device | str, powercap: Path = POWERCAP) -> EnergyMeter:
    """The meter of what computes on ``device``.

    Raises:
        NoMeterError: there is none.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _nvml_meter(device.index or 0)
    return EnergyMeter(RaplCounter(powercap), "RAPL, all processor packages")


def _nvml_meter(index: int) -> EnergyMeter:
    nvml = _nvml()
    try:
        nvml.nvmlInit()
        # NVML counts all devices; torch only those that CUDA_VISIBLE_DEVICES leaves.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:  # pynvml raises errors of its own kind
        raise NoMeterError(f"NVML does not tell the energy of cuda:{index} ({error})") from None
    return EnergyMeter(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, f"NVML, cuda:{index}")


def _nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise NoMeterError("energy of a CUDA device needs NVML: pip install nvidia-ml-py") from None
