"""The page of all claims and results, as it is recorded and for results that are made up."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from retime.foundations.measure import spread
from retime.recipes import report, results_index
from retime.recipes.core import age
from retime.recipes.core.charts import MOST_PIXELS
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.results import FILE, Point, Result, Row, load
from retime.recipes.core.verdicts import Verdict
from retime.recipes.results_index import index
from retime.recipes.results_page import JudgedPaper, evidence, judged_papers, name_of, page
from retime.recipes.results_picture import LEAST, draw, drawable

RESULTS = Path(__file__).parents[2] / "results"
AGE = re.compile(r"as it stands: \d+ of \d+|stale, \d+ of \d+ files|current|commit not in the history|age unknown")
PEERS_TO_COME: set[str] = set()  # rows of recipes that no record has yet


@pytest.fixture(scope="module")
def recorded() -> dict[Path, Result]:
    return {path: load(path) for path in sorted(RESULTS.rglob(FILE))}


@pytest.fixture(scope="module")
def papers(recorded: dict[Path, Result]) -> list[JudgedPaper]:
    return judged_papers({name_of(path, RESULTS): result for path, result in recorded.items()})


def made_up(commit: str | None, batch: int, seconds: float = 90.0, cores: int | None = None) -> Point:
    rows = [Row(name, "step", "ms", [2.0]) for name in ("baseline", "fused", "retime_backward", "retime_forward")]
    hardware = {"processor": "some | processor", "cores": "4"}
    finished, settings = f"2026-01-0{batch}T12:00", {"hardware": {"name": "cpu", "cores": cores}}
    at = {"case": f"batch{batch}"}
    return Point(at, settings, rows, hardware=hardware, commit=commit, finished=finished, seconds=seconds)


def of(*points: Point, simulated: bool = False) -> str:
    """The line of a result with these points."""
    recipe = "retime.recipes.fusion.figures.SavedTime"
    result = Result("demo", recipe, "a-paper", "Figure 1", "A title", list(points), simulated=simulated)
    return index({Path("results/a/cpu") / FILE: result}, Path("results"))[-1]


def test_the_page_is_that_of_the_results(recorded: dict[Path, Result]) -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    new = page(recorded, RESULTS, age=lambda result, folders: "current")
    assert AGE.sub("current", text) == AGE.sub("current", new), "run `python -m retime.recipes.report results`"


def test_what_does_not_hold_says_why(papers: list[JudgedPaper]) -> None:
    failing = [claim for one in papers for claim in one.claims if claim.verdict is Verdict.FAILS]
    assert [claim.published.id for claim in failing if not claim.why] == []


def test_every_claim_with_a_result_has_values(papers: list[JudgedPaper]) -> None:
    lost = {claim.published.id for one in papers for claim in one.claims if claim.verdict is Verdict.NOT_MEASURED}
    assert lost == PEERS_TO_COME


def test_claims_of_a_paper_cite_its_value(papers: list[JudgedPaper]) -> None:
    """A comparison that recipes make with a claim has the value that the claim has."""
    wrong = [
        f"{claim.published.id}: {value.published}"
        for one in papers
        for claim in one.claims
        for value in claim.values
        if claim.published.value is not None and not claim.published.derived and claim.published.read.lines
        if "target" not in claim.published.read.lines.get("where", "") and value.published != claim.published.value
    ]
    assert wrong == []


def test_commits_are_in_the_history(recorded: dict[Path, Result]) -> None:
    if not age.whole():
        pytest.skip("no checkout with the whole history")
    commits = {name_of(path, RESULTS): age.commits(result) for path, result in recorded.items()}
    assert {name for name, those in commits.items() if not all(map(age.in_history, those))} == set()


def test_a_line_says_machine_days_duration_and_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retime.recipes.fusion.figures.SavedTime.compare", lambda self, result: [])
    line = of(made_up("abc", 1), made_up("abc", 2))
    assert line == (
        "| [a-paper, Figure 1](a/cpu/result.md) | A title | `demo` | some \\| processor, 4 cores "
        "| 2026-01-01 to 2026-01-02 | 3 min | clean |  |"
    )
    assert "some \\| processor, 1 core |" in of(made_up("abc", 1, cores=1))  # as pinned, not as the machine has
    assert "| simulated |" in of(made_up("abc", 1), simulated=True)
    assert "| not recorded | clean |" in of(made_up("abc", 1, seconds=0.0))
    assert "| changed |" in of(made_up("abc+changes", 1))
    assert "| changed in 1 of 2 points |" in of(made_up("abc+changes", 1), made_up("abc", 2))
    assert "| not recorded |  |" in of(made_up(None, 1))


def test_targets_are_met_missed_or_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [1.2, 1.3], [1.0, 1.05], [1.0, 1.3], [1.2]
    lines = [Comparison(Target("speed", "x", 1.1), spread(rounds)) for rounds in measured]
    lines += [Comparison(Target("time", "%", 5, at_most=True), spread([4.0])), Comparison(Target("not", "x", 1))]
    monkeypatch.setattr("retime.recipes.fusion.figures.SavedTime.compare", lambda self, result: lines)
    assert of(made_up("abc", 1)).endswith("| 3 met, 1 **missed**, 1 undecided |")


def test_evidence_has_the_medians_of_all_tries(recorded: dict[Path, Result]) -> None:
    """Sums took twice as long the second time; the first had no rows yet."""
    path = RESULTS / "cpu-accumulation" / "table-4" / "cpu" / FILE

    def slower(row: Row) -> Row:
        return replace(row, values=[2 * value for value in row.values]) if row.quantity == "accumulate" else row

    first = [replace(point, rows=[slower(row) for row in point.rows]) for point in recorded[path].points]
    both = zip(recorded[path].points, first, strict=True)
    points = [replace(new, former=[replace(old, rows=[], facts={}), old]) for new, old in both]
    results = {name_of(path, RESULTS): replace(recorded[path], points=points)}
    paper = next(one for one in judged_papers(results) if one.results)
    claim = next(claim for claim in paper.claims if claim.published.id == "accumulation-short")
    medians = [value.measured.median for value in claim.values]
    text = evidence(paper, claim, RESULTS, lambda result, folders: "current")
    most = max(medians)
    said = f"{most:.3f} x to {2 * most:.3f} x at the widest of {len(medians)} places"
    assert text.endswith(f"current, 2 tries: {said}")


def test_the_page_stands_without_any_evidence(tmp_path: Path) -> None:
    assert page({}, tmp_path).startswith("# Results\n\n| result |")
    papers = judged_papers({})
    assert all(not claim.values for one in papers for claim in one.claims)
    assert draw(papers, tmp_path / "claims.png") is False


def test_the_picture_has_a_line_a_speedup(papers: list[JudgedPaper], tmp_path: Path) -> None:
    panels = drawable(papers)
    assert {one.paper.paper for one in papers} < set(panels)
    for lines in panels.values():
        assert all(claim.published.unit == "x" and claim.values for _, claim in lines)
    published = [claim.published for one in papers for claim in one.claims if claim.values]
    drawn = sum(map(len, panels.values()))
    assert drawn == sum(claim.unit == "x" and (claim.value or 0) >= LEAST for claim in published)


def test_no_picture_is_wider_than_a_page_shows() -> None:
    widths = {path: int.from_bytes(path.read_bytes()[16:20], "big") for path in RESULTS.rglob("*.png")}
    assert len(widths) > 50
    assert [path for path, width in widths.items() if width > MOST_PIXELS] == []


def test_rebuilding_one_result_writes_no_list(tmp_path: Path) -> None:
    folder = tmp_path / "figure-4"
    load(RESULTS / "ooo-backprop" / "figure-4" / "simulated" / FILE).save(folder)
    report.rebuild(folder)
    assert not (folder / "README.md").exists()
    report.rebuild(tmp_path)
    assert "(figure-4/result.md)" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert results_index.duration(0) == "not recorded"
