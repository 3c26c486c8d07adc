"""`cpu_memory_targets` in small: one process each, rows, targets, the picture, and allocators that are not there."""

from dataclasses import replace
from pathlib import Path

import pytest

from retime.foundations.cpu_pool import MemoryPool
from retime.recipes.cpu_memory import allocators
from retime.recipes.cpu_memory.allocators import NoAllocatorError, environment_of
from retime.recipes.cpu_memory.settings import AllocatorSettings
from retime.recipes.cpu_memory.targets import GROWN, LIVE, STEP, AllocatorTargets, best_of
from support.recipes import ran, settings_for

SMALL = [
    *("experiment=cpu_memory_targets", "processes=1", "rounds=2", "allocators=[glibc,kept_heap,tcmalloc]"),
    *("~cases.VGG-like", "~cases.ResNet-like", "~cases.GPT-2", "~cases.linear-64"),
    *("cases.linear-4.model.depth=3", "cases.linear-4.model.width=64", "cases.linear-4.steps=1"),
    *("cases.linear-4.data.features=64", "cases.linear-4.data.classes=64"),
]


@pytest.fixture
def settings(monkeypatch) -> AllocatorSettings:
    monkeypatch.setattr(allocators, "_FOLDERS", ())
    monkeypatch.setattr(allocators.ctypes.util, "find_library", lambda name: None)
    whole = settings_for(*SMALL)
    case = whole.cases["linear-4"]  # a process each: one with the pool, one with a variant of fusion
    ours = {label: case["ours"][label] for label in ("with retime's pool", "retime backward fusion")}
    return replace(whole, cases={"linear-4": {**case, "ours": ours}})


@pytest.mark.long
def test_it_measures_and_reports(settings, tmp_path: Path) -> None:
    pool = MemoryPool()
    if not pool.install():
        pytest.skip(pool.why_not)
    pool.remove()
    recipe = AllocatorTargets()
    result = ran(recipe, settings, tmp_path)
    (point,) = result.points
    plain = ["glibc", "glibc, heap kept"]
    assert point.variants(STEP) == [*plain, *settings.cases["linear-4"]["ours"]]
    assert best_of(point) in plain
    assert "libtcmalloc_minimal" in point.facts["missing"]["tcmalloc"]
    assert point.values("with retime's pool", LIVE)[0] > 0
    assert point.variants(GROWN) == [name for name in point.variants(STEP) if name.endswith("pool")]
    lines = recipe.compare(result)
    wanted = [line.against.value for line in lines if "linear-4, over" in line.note]
    assert wanted == [1.0, 1.1, 1.06]
    assert any("page faults avoided" in note for note in recipe.notes(result))


def test_libraries_in_other_places(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.touch()
    assert environment_of("tcmalloc", {"tcmalloc": str(library)}) == {"LD_PRELOAD": str(library)}
    with pytest.raises(NoAllocatorError, match=r"libraries\.tcmalloc=.*is no file"):
        environment_of("tcmalloc", {"tcmalloc": str(tmp_path / "none.so")})
    with pytest.raises(ValueError, match="choose from glibc"):
        environment_of("nothing", {})
