"""`ooo_fig7` in small: one process, plain and two streams, verdicts by quartiles, and the picture."""

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from retime.recipes.core.measure import spread
from retime.recipes.core.results import Point, Row
from retime.recipes.core.schema import AllocatorSettings, register_all, settings_of
from retime.recipes.cpu_memory import allocators
from retime.recipes.ooo import single_device
from retime.recipes.ooo.single_device import SingleDevice, best_plain, gains, verdict

SMALL = ["experiment=ooo_fig7", "processes=1", "steps=1", "allocators=[glibc,tcmalloc]"]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> AllocatorSettings:
    monkeypatch.setattr(allocators, "_FOLDERS", ())
    monkeypatch.setattr(allocators.ctypes.util, "find_library", lambda name: None)
    register_all()
    with initialize_config_module("retime.conf", version_base=None):
        whole = settings_of(compose("config", SMALL))
    assert isinstance(whole, AllocatorSettings)
    case = whole.cases["24 linear layers"]
    small = {
        "model": {**case["model"], "depth": 3, "width": 16},
        "data": {**case["data"], "features": 16, "classes": 16},
    }
    return replace(whole, cases={"linear": {**case, **small}})


def test_it_measures_and_reports(settings: AllocatorSettings, tmp_path: Path) -> None:
    recipe = SingleDevice()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    (point,) = result.points
    *plain, ours = point.variants("step")
    assert ours == "two streams, glibc"
    assert "plain, 1 thread, glibc" in plain
    assert "libtcmalloc_minimal" in point.facts["missing"]["tcmalloc"]
    assert "still searching" not in point.facts["reports"][ours]
    assert len(point.facts["kept"][ours]) == 1
    assert any("24 linear" not in line.note and "linear, glibc" in line.note for line in recipe.compare(result))
    recipe.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_two_streams_are_held_against_the_best_plain_step_of_the_same_allocator() -> None:
    times = {
        "plain, 1 thread, glibc": [8.0, 8.0],
        "plain, 2 threads, glibc": [6.0, 6.0],
        "two streams, glibc": [5.0, 5.0],
        "plain, 1 thread, tcmalloc": [4.0, 4.0],
        "two streams, tcmalloc": [4.0, 5.0],
    }
    point = Point({"case": "x"}, {"case": {}}, [Row(name, "step", "ms", values) for name, values in times.items()])
    assert best_plain(point) == "plain, 1 thread, tcmalloc"
    assert {label: over.rounds for label, over in gains(point).items()} == {
        "two streams, tcmalloc": [1.0, 0.8],
        "two streams, glibc": [1.2, 1.2],
    }


@pytest.mark.parametrize(
    ("rounds", "said"), [([1.2, 1.2], "holds"), ([0.9, 0.95], "does not hold"), ([1.0, 1.3], "undecided")]
)
def test_verdicts_follow_from_quartiles(rounds: list[float], said: str) -> None:
    assert verdict(spread(rounds), 1.1).startswith(said)


def test_other_devices_are_refused(settings: AllocatorSettings) -> None:
    cuda = replace(settings, hardware=replace(settings.hardware, device="cuda"))
    with pytest.raises(ValueError, match="choose hardware=cpu"):
        single_device.SingleDevice().measure(cuda, {"case": "linear"}, print)
