"""The page that lists all results."""

from pathlib import Path

from retime.recipes import report
from retime.recipes.core.results import FILE, Point, Result, Row, load
from retime.recipes.results_index import index

RESULTS = Path(__file__).parents[2] / "results"


def made_up(commit: str | None, batch: int, seconds: float = 90.0) -> Point:
    rows = [Row(name, "step", "ms", [2.0]) for name in ("baseline", "fused", "retime_backward", "retime_forward")]
    hardware = {"processor": "some | processor", "cores": "4"}
    at = {"case": f"batch{batch}"}
    return Point(at, {}, rows, hardware=hardware, commit=commit, finished=f"2026-01-0{batch}T12:00", seconds=seconds)


def of(*points: Point, simulated: bool = False) -> str:
    """The line of a result with these points."""
    recipe = "retime.recipes.fusion.figures.SavedTime"
    result = Result("demo", recipe, "a-paper", "Figure 1", "A title", list(points), simulated=simulated)
    return index({Path("results/a/cpu") / FILE: result}, Path("results")).splitlines()[-1]


def test_the_page_is_that_of_the_results() -> None:
    results = {path: load(path) for path in sorted(RESULTS.rglob(FILE))}
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert text == index(results, RESULTS), "run `python -m retime.recipes.report results`"


def test_a_line_says_machine_days_and_duration(monkeypatch) -> None:
    monkeypatch.setattr("retime.recipes.fusion.figures.SavedTime.compare", lambda self, result: [])
    line = of(made_up("abc", 1), made_up("abc", 2))
    assert line == (
        "| [a-paper, Figure 1](a/cpu/result.md) | A title | `demo` | some \\| processor, 4 | 2026-01-01 to 2026-01-02 "
        "| 3 min | clean |  |"
    )
    assert "| simulated |" in of(made_up("abc", 1), simulated=True)
    assert "| not recorded | clean |" in of(made_up("abc", 1, seconds=0.0))


def test_a_changed_tree_is_named(monkeypatch) -> None:
    monkeypatch.setattr("retime.recipes.fusion.figures.SavedTime.compare", lambda self, result: [])
    assert "| changed |" in of(made_up("abc+changes", 1))
    assert "| changed in 1 of 2 points |" in of(made_up("abc+changes", 1), made_up("abc", 2))
    assert "| not recorded |  |" in of(made_up(None, 1))


def test_targets_are_counted() -> None:
    targets = RESULTS / "optimizer-fusion" / "targets" / "cpu" / FILE
    assert index({targets: load(targets)}, RESULTS).endswith("| 6 met, **1 missed** |\n")


def test_rebuilding_one_result_writes_no_list(tmp_path: Path) -> None:
    source = RESULTS / "ooo-backprop" / "figure-4" / "simulated" / FILE
    folder = tmp_path / "figure-4"
    folder.mkdir()
    (folder / FILE).write_bytes(source.read_bytes())
    report.rebuild(folder)
    assert not (folder / "README.md").exists()
    report.rebuild(tmp_path)
    assert "(figure-4/result.md)" in (tmp_path / "README.md").read_text(encoding="utf-8")
