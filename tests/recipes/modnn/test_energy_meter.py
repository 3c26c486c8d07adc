"""The energy meter on a made-up powercap folder, and its refusals."""

from pathlib import Path

import pytest

from retime.recipes.modnn.power import EnergyMeter, NoMeterError, RaplCounter, Watch, find_meter


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
