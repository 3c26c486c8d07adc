"""Figures 15 and 16 of moDNN: power and energy of training inside budgets, from the meters that a machine has.

    meter = find_meter("cpu", Path("/sys/class/powercap"))  # NVML for CUDA devices, RAPL's counters for the processor
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

from retime.foundations.workers import Worker
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row, percent_more, titled
from retime.recipes.modnn.settings import MemorySettings, NetworkRecipe, claim
from retime.recipes.modnn.side_by_side import BUDGET, STEP, UNLIMITED, block_ms, budgets_of, side_by_side


class NoMeterError(RuntimeError):
    """This machine has no meter of energy that can be read; the message says which was looked for."""


@dataclass
class Watch:
    """Record of what a meter saw."""

    joules: float = 0.0  # used meanwhile by all that the meter covers
    seconds: float = 0.0  # how long it was watched
    samples: list[float] = field(default_factory=list)  # power between two readings, in watts

    def add(self, seconds: float, joules: float, least_s: float = 0.0) -> None:
        """Add what was used since the reading before; of less than ``least_s`` no power is kept, it would be chance."""
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


@dataclass(frozen=True)
class EnergyMeter:
    """Reads a counter of energy at the ends and every so often between them."""

    read_joules: Callable[[], float]  # used since some moment; never falls
    source: str  # what the counter covers, in words
    every_s: float = 0.05  # between two readings
    clock: Callable[[], float] = time.perf_counter  # seconds

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Watch what the block uses; the watch is complete when the block has ended."""
        watch, done = Watch(), threading.Event()
        last = (self.clock(), self.read_joules())

        def take() -> None:
            nonlocal last
            now = (self.clock(), self.read_joules())
            watch.add(now[0] - last[0], now[1] - last[1], self.every_s / 2)
            last = now

        def sample() -> None:
            while not done.wait(self.every_s):
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

    Its ``intel-rapl:N`` folders are packages; what is inside them (``intel-rapl:0:1``) is a part of one. NoMeterError
    if there is no package, or its counter may not be read.
    """

    def __init__(self, folder: Path) -> None:
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


def find_meter(device: torch.device | str, powercap: Path) -> EnergyMeter:
    """The meter of what computes on ``device``; NoMeterError if there is none."""
    device = torch.device(device)
    if device.type != "cuda":
        return EnergyMeter(RaplCounter(powercap), "RAPL, all processor packages")
    index = device.index or 0
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise NoMeterError("energy of a CUDA device needs NVML: pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
        # NVML counts all devices; torch only those that CUDA_VISIBLE_DEVICES leaves.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:  # pynvml raises errors of its own kind
        raise NoMeterError(f"NVML does not tell the energy of cuda:{index} ({error})") from None
    return EnergyMeter(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, f"NVML, cuda:{index}")


ENERGY, MEAN, MOST = "energy a step", "average power", "most power"
NO_METER, METER = "no meter", "meter"
_PANELS = {MEAN: "average power (Figure 15)", MOST: "most power (Figure 15)", ENERGY: "energy (Figure 16)"}


class Power(NetworkRecipe):
    """A point a network; a variant a budget. Without a meter a point holds the reason and no number."""

    quantity = ENERGY

    def references(self, point: Point) -> dict[str, str]:
        return {"unlimited's energy over its own": UNLIMITED}

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        try:
            meter = find_meter(settings.hardware.device, Path(settings.powercap))
        except NoMeterError as error:
            return Measured([], {NO_METER: str(error)})
        seen: dict[str, list[Watch]] = {}

        def block(worker: Worker, steps: int, name: str, facts: dict[str, Any]) -> float:
            with meter.watching() as watch:
                step_ms = block_ms(worker, steps, name, facts)
            seen.setdefault(name, []).append(watch)
            return step_ms

        rows, facts = side_by_side(settings, settings.cases[at["network"]], settings.budgets, tick, block)
        steps = settings.steps + (settings.hardware.device != "cpu")  # there a block has one more, which is not timed
        for name, watches in seen.items():
            if any(row.variant == name and row.quantity == STEP for row in rows):
                measured = watches[settings.warmup_rounds :]
                rows += [
                    Row(name, ENERGY, "J", [watch.joules / steps for watch in measured]),
                    Row(name, MEAN, "W", [watch.mean_watts for watch in measured]),
                    Row(name, MOST, "W", [watch.max_watts for watch in measured]),
                ]
        return Measured(rows, {METER: meter.source, **facts})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            if NO_METER in point.facts:
                lines.append(Comparison(claim("figure-15"), None, f"{point.at['network']}: {point.facts[NO_METER]}"))
            for name in budgets_of(point):
                added = percent_more(point, name, UNLIMITED, MEAN)
                lines.append(Comparison(claim("figure-15"), added, f"{point.at['network']}, {name}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            "Energy is what the meter counted while a block of steps ran, over its steps. RAPL counts whole processor "
            "packages, so also what else they do; NVML counts the whole board.",
            "Figure 15 shows maximum power too, but section 7.4 gives no number for it, only that it falls with the "
            "sub-batch size where the batch no longer fits whole: it is drawn, and there is no line to compare.",
            *(
                "- " + (_not_measured(point) or f"{point.at['network']}: {point.facts[METER]}")
                for point in result.points
            ),
        ]

    def draw(self, result: Result, path: Path) -> None:
        quantities = [quantity for quantity in _PANELS if any(_places(point, quantity) for point in result.points)]
        if not quantities:
            reasons = [
                _not_measured(point) or f"{point.at['network']}: trained in no budget" for point in result.points
            ]
            charts.save(charts.only_text(result.title, reasons or ["nothing was measured"]), path)
            return
        drawing, panels = charts.panels(titled(result), len(quantities), width=5.0 * len(quantities))
        for axes, quantity in zip(panels, quantities, strict=True):
            for index, point in enumerate(result.points):
                places = _places(point, quantity)
                values = [point.speedup(name, UNLIMITED, quantity) for name in places]
                if values:
                    charts.points_with_spread(
                        axes, list(places.values()), values, point.at["network"], index, line=True
                    )
            axes.set_xlabel("budget (% of the ideal peak)")
            axes.set_ylabel(f"{_PANELS[quantity]} over unlimited")
            axes.invert_xaxis()
            charts.even_line(axes, "unlimited")
            axes.legend(fontsize=8)
        charts.save(drawing, path)


def _not_measured(point: Point) -> str | None:
    """Line of a report on a machine without a meter."""
    if NO_METER not in point.facts:
        return None
    return f"{point.at['network']}: not measured, because this machine has no meter: {point.facts[NO_METER]}"


def _places(point: Point, quantity: str) -> dict[str, float]:
    """The budgets with this quantity, in percent of the ideal peak."""
    return {
        name: 100 * point.values(name, BUDGET)[0] / point.facts["ideal peak MiB"]
        for name in budgets_of(point)
        if point.has(name, quantity)
    }
