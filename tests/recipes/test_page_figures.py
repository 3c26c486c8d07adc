"""Figures on pages are those of the recorded results, and pages' tables of measurements have no others."""

import re
from pathlib import Path

import pytest

from retime.foundations.measure import spread
from retime.recipes import report
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.page_figures import FIGURES, MARK, Figure, fill, filled, pages_of, texts_of, written

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
FRONT_PAGE = ROOT / "README.md"
CARDS = [page for page in pages_of(RESULTS) if page.parent.parent.name in ("mechanisms", "foundations", "scan")]
GIVEN = re.compile(r"\(paper: [\d.]+\)|\([\d.]+[^()]* wanted\)|\bT? ?= ?\d+")
"""Numbers in tables that nobody measured here: the paper's, and what was aimed at."""
TYPED = re.compile(r"\d+\.\d+")


def typed_in(line: str) -> list[str]:
    """Numbers with a point in a table's line, behind its first cell, that are not filled in."""
    cells = GIVEN.sub("", MARK.sub("", line)).strip().strip("|").split("|")
    return [number for cell in cells[1:] for number in TYPED.findall(cell)]


def measured_lines(page: Path) -> list[str]:
    """Lines of tables below a card's headings "When it pays" and "Measured"."""
    sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    chosen = [section for section in sections if section.startswith(("When it pays", "Measured"))]
    return [line for section in chosen for line in section.splitlines() if line.startswith("|")]


def result(**values: list[float]) -> Result:
    rows = [Row(name, "step", "ms", numbers) for name, numbers in values.items()]
    return Result("demo", "retime.recipes.fusion.figures.Optimizers", "p", "Figure 1", "A title", [Point({}, {}, rows)])


def folder_with(tmp_path: Path, page: str, figures: str, **values: list[float]) -> Path:
    folder = tmp_path / "results"
    result(**values).save(folder / "a" / "cpu")
    (folder / FIGURES).write_text(figures, encoding="utf-8")
    (tmp_path / "README.md").write_text(page, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return texts_of(RESULTS)


def test_pages_have_the_figures_of_the_results(texts: dict[str, str]) -> None:
    shown = set()
    for page in pages_of(RESULTS):
        text = page.read_text(encoding="utf-8")
        shown |= {mark[0] for mark in MARK.findall(text)}
        assert filled(text, texts) == text, f"{page}: run `python -m retime.recipes.report results`"
        assert re.findall("<!--=", text) == ["<!--="] * len(MARK.findall(text)), f"{page}: a mark that is not closed"
        assert not re.search(r"^ {0,3}<!--=", text, re.MULTILINE), (
            f"{page}: at a line's start a comment ends a paragraph"
        )
    assert shown == set(texts)


def test_the_front_pages_table_has_no_typed_figures() -> None:
    lines = [line for line in FRONT_PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len([line for line in lines if MARK.search(line)]) == 8
    assert {line: typed_in(line) for line in lines if typed_in(line)} == {}


@pytest.mark.parametrize("card", [pytest.param(card, id=card.parent.name) for card in CARDS])
def test_cards_tables_of_measurements_have_no_typed_figures(card: Path) -> None:
    assert {line: typed_in(line) for line in measured_lines(card) if typed_in(line)} == {}


def test_typed_figures_are_seen() -> None:
    assert typed_in("| width 0.25 | 1.03 | <!--=a-->0.97<!--/--> (paper: 1.5) (1.08 wanted) |") == ["1.03"]
    assert sum(len(measured_lines(card)) for card in CARDS) > 40


def test_the_report_fills_pages(tmp_path: Path) -> None:
    figures = "a/cpu: {fast: {ratio: [plain, ours]}, slow: {ratio: [plain, other]}}"
    page = "# Page\n\n| <!--=fast-->?<!--/--> of plain; **<!--=slow-->9.99<!--/-->** |\n"
    folder = folder_with(tmp_path, page, figures, plain=[3.0, 3.0], ours=[2.0, 2.0], other=[4.0, 4.0])
    report.list_results(folder)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text == "# Page\n\n| <!--=fast-->1.50<!--/--> of plain; **<!--=slow-->0.75<!--/-->** |\n"


@pytest.mark.parametrize(
    ("page", "figures", "message"),
    [
        ("<!--=b-->1<!--/-->", "a/cpu: {}", "no figure is named b"),
        ("none", "a/cpu: {b: {ratio: [plain, ours]}}", "has b, which no page shows"),
        ("<!--=b-->1<!--/-->", "a/cpu: {b: {ratio: [plain, gone]}}", "a/cpu, b: 0 values: change at"),
        ("<!--=b-->1<!--/-->", "a/cpu: {b: {ratio: [plain, ours], form: mean}}", "b: form is one of median"),
    ],
)
def test_a_figure_that_cannot_be_filled_is_named(tmp_path: Path, page: str, figures: str, message: str) -> None:
    folder = folder_with(tmp_path, page, figures, plain=[3.0], ours=[2.0])
    with pytest.raises(ValueError, match=message):
        fill(folder)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == page


def test_forms_of_figures() -> None:
    one, two = spread([1.0, 1.1, 1.26]), spread([0.5, 0.8, 0.9])
    assert written(Figure(), [one]) == "1.10"
    assert written(Figure(form="quartiles", digits=1), [one]) == "1.1 (1.1 to 1.2)"
    assert written(Figure(form="range"), [one, two]) == "0.80 to 1.10"
    assert written(Figure(form="range"), [two, two]) == "0.80"
    assert written(Figure(form="least"), [one, two]) == "0.80"
    assert written(Figure(form="most"), [one, two]) == "1.10"
    assert written(Figure(inverse=True), [two]) == "1.25"
    assert written(Figure(times=100, digits=0), [two]) == "80"
    with pytest.raises(ValueError, match="2 values"):
        written(Figure(), [one, two])
