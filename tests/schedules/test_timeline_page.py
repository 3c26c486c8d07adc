"""Pages with timelines: what is in them, and what a real browser makes of them."""

import json
import re
from pathlib import Path

import pytest

from retime.schedules import Kind, Span, write_page
from retime.schedules.timeline import COLOURS, colours_of
from support.browser import CHROMIUM, NO_CHROMIUM, Browser

RANKS = [
    Span("F1@0", "rank0", 10.0, 2.0, "forward"),
    Span("F1@1", "rank0", 12.0, 2.0, "forward"),
    Span("W1@0", "rank0", 18.0, 4.0, "weight gradient"),
    Span("B2@0", "rank1", 12.0, 4.0, "both gradients"),
    Span("</script><b>'", "rank1", 16.0, 0.0),
]


def data_in(page: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])


def test_a_page_holds_every_task_in_words(tmp_path):
    page = tmp_path / "made" / "step.html"
    write_page(page, {"before": RANKS, "after": RANKS[:1]}, title="a <step>", unit="stage", idle="bubble")
    data = data_in(page)
    assert data["title"] == "a <step>"
    before, after = data["charts"]
    assert [words for _, words, *_ in before["spans"]] == [
        "forward of stage 1, micro-batch 0",
        "forward of stage 1, micro-batch 1",
        "weight gradient of stage 1, micro-batch 0",
        "both gradients of stage 2, micro-batch 0",
        "</script><b>'",
    ]
    assert before["lanes"] == ["rank0", "rank1"]
    assert before["shares"] == [": bubble 33%", ": bubble 0%"]  # 4 of 12 ms
    assert (before["range"], after["range"]) == ([10.0, 22.0], [10.0, 12.0])


def test_a_page_needs_no_other_file(tmp_path):
    write_page(tmp_path / "step.html", {"": RANKS})
    text = (tmp_path / "step.html").read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "://" not in text
    assert not re.search(r"\bsrc=|@import|url\(", text)


def test_a_page_has_more_than_charts(tmp_path):
    page = tmp_path / "step.html"
    write_page(page, {"": RANKS}, above="<p>first</p>", below="<p>last</p>")
    text = page.read_text("utf-8")
    assert text.index("<p>first</p>") < text.index("<main>") < text.index("<p>last</p>")
    write_page(page, {}, above="<p>nothing was drawn</p>")
    assert data_in(page)["charts"] == []


def test_kinds_have_the_same_colour_in_every_chart():
    words = [kind.words for kind in Kind]
    for some in (words, words[::-1], words[3:5]):
        assert {colours_of([Span("", "", 0, 1, word)])[word] for word in some} == {
            COLOURS[words.index(word)] for word in some
        }
    mixed = colours_of(Span("", "", 0, 1, category) for category in ("other", words[0], "another"))
    assert mixed[words[0]] == COLOURS[0]
    assert len(set(mixed.values())) == 3


@pytest.mark.parametrize("charts", [{}, {"a": []}])
def test_a_page_of_nothing_is_refused(tmp_path, charts):
    with pytest.raises(ValueError, match=r"nothing\.html': there are no spans"):
        write_page(tmp_path / "nothing.html", charts)
    assert not (tmp_path / "nothing.html").exists()


WIDE = "document.querySelector('[data-span]').getBoundingClientRect().width"
BACK = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
@pytest.mark.parametrize("width", [1200, pytest.param(400, marks=pytest.mark.long)])
def test_a_browser_shows_zooms_and_moves(tmp_path, width):
    page = tmp_path / "step.html"
    write_page(page, {"": RANKS}, title="optimizer step 3", unit="stage", idle="bubble")
    with Browser(tmp_path / "browser") as browser:
        browser.open(page, width)
        assert browser.run("document.title") == "optimizer step 3"
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("[...document.querySelectorAll('#legend li')].map((one) => one.textContent)") == [
            *("forward", "weight gradient", "both gradients")
        ]
        whole = browser.run(WIDE)
        assert whole == pytest.approx(browser.run("document.querySelector('svg').clientWidth") / 6, rel=0.02)

        browser.click("[data-span='0']")
        assert browser.run("document.querySelector('output').textContent") == (
            "forward of stage 1, micro-batch 0: 2 ms, from 0 ms to 2 ms; rank0"
        )
        assert browser.run("document.querySelector('#tip').textContent").startswith("forward of stage 1")
        assert browser.run("document.querySelector('.chosen').dataset.span") == "0"

        browser.click("[data-zoom=in]")  # around the middle: the first task is out of the window, another is wider
        assert browser.run("document.querySelector('[data-span=\"0\"]')") is None
        browser.click("[data-zoom=whole]")
        assert browser.run(WIDE) == pytest.approx(whole)
        browser.run("document.querySelector('svg').focus()")
        for key in ("+", *["ArrowLeft"] * 6):
            browser.key(key)
        assert browser.run(WIDE) > 1.5 * whole
        browser.key("0")
        left, top, wide, _ = browser.place("svg")
        browser.mouse("mouseWheel", left + 1, top + 30, deltaX=0, deltaY=-300)
        browser.settle()
        zoomed = browser.run(WIDE)
        assert zoomed > 1.5 * whole
        browser.mouse("mousePressed", left + wide / 2, top + 30, button="left", buttons=1)
        browser.mouse("mouseMoved", left + wide / 2 - 20, top + 30, button="left", buttons=1)
        browser.mouse("mouseReleased", left + wide / 2 - 20, top + 30, button="left")
        browser.settle()
        assert browser.run(WIDE) == pytest.approx(zoomed - 20, abs=1)  # its left end is outside now

        light = browser.run(BACK)
        browser.click("#theme")
        dark = browser.run(BACK)
        assert dark != light
        browser.open(page, width, dark=True)
        assert browser.run(BACK) == dark
        browser.click("#theme")
        assert browser.run(BACK) == light
        assert browser.errors == []
