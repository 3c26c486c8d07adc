"""The energy meter on a made-up powercap folder; figures 15 and 16, in which nothing is made up without a meter."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retime.recipes.core.results import Point, Result, Row, load
from retime.recipes.core.schema import Hardware
from retime.recipes.modnn import power as modnn_power
from retime.recipes.modnn.power import (
    ENERGY,
    MEAN,
    MOST,
    NO_METER,
    EnergyMeter,
    NoMeterError,
    Power,
    RaplCounter,
    Watch,
    find_meter,
)
from retime.recipes.modnn.settings import MemorySettings, claim
from retime.recipes.modnn.side_by_side import STEP, UNLIMITED


def package(folder: Path, name: str, microjoules: int, span: int = 1_000_000_000) -> Path:
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "energy_uj").write_text(f"{microjoules}\n")
    (place / "max_energy_range_uj").write_text(f"{span}\n")
    return place


def test_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    for name, start in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 7_000_000), ("intel-rapl:0:0", 1_000_000)):
        package(tmp_path, name, start)
    read = RaplCounter(tmp_path)
    assert read() == 0
    package(tmp_path, "intel-rapl:0", 8_000_000)
    package(tmp_path, "intel-rapl:1", 9_500_000)
    package(tmp_path, "intel-rapl:0:0", 900_000_000)
    assert read() == 5.5


def test_counters_that_begin_again_are_followed(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 90_000_000, span=100_000_000)
    read = RaplCounter(tmp_path)
    package(tmp_path, "intel-rapl:0", 2_000_000, span=100_000_000)
    assert read() == 12.0
    package(tmp_path, "intel-rapl:0", 3_000_000, span=100_000_000)
    assert read() == 13.0


def test_a_watch_has_joules_seconds_and_watts() -> None:
    times, joules = iter([10.0, 14.0]), iter([100.0, 180.0])
    meter = EnergyMeter(lambda: next(joules), "test", every_s=1e6, clock=lambda: next(times))
    with meter.watching() as watch:
        pass
    assert (watch.joules, watch.seconds, watch.mean_watts, watch.max_watts) == (80.0, 4.0, 20.0, 20.0)


def test_the_most_power_is_that_of_a_sample() -> None:
    """Readings of 2 and 6 joules a second, and a last one so soon that its power says nothing."""
    watch = Watch()
    for seconds, joules in ((1.0, 2.0), (1.0, 6.0), (0.01, 1.0)):
        watch.add(seconds, joules, least_s=0.5)
    assert (watch.joules, watch.seconds, watch.samples, watch.max_watts) == (9.0, 2.01, [2.0, 6.0], 6.0)


def test_a_machine_without_a_meter_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NoMeterError, match="has no intel-rapl package"):
        find_meter("cpu", tmp_path)


def test_a_counter_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (package(tmp_path, "intel-rapl:0", 1) / "energy_uj").unlink()
    with pytest.raises(NoMeterError, match=r"cannot be read .*run as root"):
        find_meter("cpu", tmp_path)


def test_the_found_meter_reads_the_folder(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 1_000_000)
    meter = find_meter("cpu", tmp_path)
    with meter.watching() as watch:
        package(tmp_path, "intel-rapl:0", 4_000_000)
    assert watch.joules == 3.0
    assert meter.source == "RAPL, all processor packages"


def test_without_a_meter_the_reason_is_all_there_is(run: Callable[..., Path]) -> None:
    path = run("experiment=modnn_fig15", "powercap=none")
    (point,) = load(path).points
    assert point.rows == []
    (line,) = Power().compare(load(path))
    assert line.measured is None
    assert "none has no intel-rapl package" in line.note
    assert "not measured, because this machine has no meter" in path.with_name("result.md").read_text()
    assert path.with_name("result.png").stat().st_size > 0


def test_joules_of_each_measured_block_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter that is read twice a block, at its ends: 6 joules and 2 seconds each, over 2 steps."""
    joules, seconds = count(0, 6), count(0, 2)
    meter = EnergyMeter(lambda: next(joules), "made up", every_s=1e6, clock=lambda: next(seconds))
    monkeypatch.setattr(modnn_power, "find_meter", lambda device, powercap: meter)
    monkeypatch.setattr(modnn_power, "block_ms", lambda worker, steps, name, facts: 1.0)

    def side_by_side(given: Any, case: Any, budgets: Any, tick: Any, block: Any) -> Any:
        for _ in range(given.rounds + given.warmup_rounds):
            for name in (UNLIMITED, "50 %", "floor"):
                block(None, given.steps, name, {})
        return [Row(UNLIMITED, STEP, "ms", [1.0]), Row("50 %", STEP, "ms", [1.0])], {"ideal peak MiB": 10.0}

    monkeypatch.setattr(modnn_power, "side_by_side", side_by_side)
    settings = MemorySettings(hardware=Hardware("cpu", "cpu", None), cases={"net": {}}, rounds=3, steps=2)
    measured = Power().measure(settings, {"network": "net"}, lambda text: None)
    rows = {(row.variant, row.quantity): row.values for row in measured.rows}
    assert rows["50 %", ENERGY] == [3.0] * 3, "the warm-up round is left out"
    assert rows[UNLIMITED, MEAN] == [3.0] * 3
    assert NO_METER not in measured.facts
    assert not any(name == "floor" for name, _ in rows), "it did not live through all rounds"


def test_power_over_unlimited() -> None:
    rows = [
        *(Row(name, STEP, "ms", [1.0, 1.0]) for name in (UNLIMITED, "50 %")),
        *(Row(UNLIMITED, quantity, "", [10.0, 20.0]) for quantity in (ENERGY, MEAN, MOST)),
        *(Row("50 %", quantity, "", [11.0, 22.0]) for quantity in (ENERGY, MEAN, MOST)),
    ]
    point = Point({"network": "net"}, {}, rows, {"meter": "made up", "ideal peak MiB": 10.0})
    (line,) = Power().compare(Result("modnn_fig15", "", "modnn", "Figures 15 and 16", "", [point]))
    assert line.against == claim("figure-15")
    assert line.measured.rounds == pytest.approx([10.0, 10.0])
