"""Timelines as files, as text and as pages, and what a real browser makes of them."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from retime.schedules import Kind, Span, picture, write_chrome_trace, write_page, write_png
from retime.schedules.timeline import COLOURS, colours_of
from support.browser import CHROMIUM, NO_CHROMIUM, Browser

SPANS = [
    Span("F1", "compute", 0.0, 1.5, "forward"),
    Span("W1", "compute", 1.5, 2.0, "weight gradient"),
    Span("S1", "network", 3.5, 1.0, "synchronisation"),
    Span("mark", "network", 4.5, 0.0),
]


def events_in(path, phase):
    return [event for event in json.loads(path.read_text("utf-8"))["traceEvents"] if event["ph"] == phase]


def test_a_trace_holds_every_span_in_microseconds(tmp_path):
    path = tmp_path / "made" / "trace.json"
    write_chrome_trace(path, reversed(SPANS), process_name="rank 0")
    assert set(json.loads(path.read_text("utf-8"))) == {"traceEvents", "displayTimeUnit"}
    boxes = events_in(path, "X")
    assert [(box["name"], box["cat"], box["tid"], box["ts"], box["dur"]) for box in boxes] == [
        ("F1", "forward", 1, 0.0, 1500.0),
        ("W1", "weight gradient", 1, 1500.0, 2000.0),
        ("S1", "synchronisation", 0, 3500.0, 1000.0),
        ("mark", "task", 0, 4500.0, 0.0),
    ]
    assert {box["pid"] for box in boxes} == {0}


def test_a_trace_names_the_process_and_the_lanes(tmp_path):
    write_chrome_trace(tmp_path / "trace.json", SPANS, process_name="rank 0")
    metadata = events_in(tmp_path / "trace.json", "M")
    assert [(event["name"], event["tid"], *event["args"].values()) for event in metadata] == [
        ("process_name", 0, "rank 0"),
        ("thread_name", 0, "compute"),
        ("thread_sort_index", 0, 0),
        ("thread_name", 1, "network"),
        ("thread_sort_index", 1, 1),
    ]


def test_a_trace_of_nothing_is_valid(tmp_path):
    write_chrome_trace(tmp_path / "trace.json", [])
    (event,) = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    assert event["args"] == {"name": "retime"}


def test_a_png_shows_the_spans(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "made" / "step.png"
    write_png(path, SPANS, title="one step: $5 of it", time_unit="units")  # a dollar sign starts no formula
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(path)[:, :, :3]
    height, width, _ = pixels.shape
    assert width > 1000
    assert height > 200
    colours = {tuple(round(float(value), 2) for value in pixel) for pixel in {*map(tuple, pixels.reshape(-1, 3))}}
    forward, weight_gradient, synchronisation = (0.0, 0.45, 0.7), (0.0, 0.62, 0.45), (0.9, 0.62, 0.0)
    assert {forward, weight_gradient, synchronisation} <= colours


def test_a_png_of_many_categories_and_lanes(tmp_path):
    pytest.importorskip("matplotlib")
    spans = [Span(f"task{i}", f"lane{i % 9}", float(i), 1.0, f"category {i}") for i in range(15)]
    write_png(tmp_path / "many.png", spans)
    write_png(tmp_path / "instant.png", [Span("now", "lane", 3.0, 0.0)])
    assert (tmp_path / "many.png").stat().st_size > 10_000
    assert (tmp_path / "instant.png").stat().st_size > 1_000


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "lightning-retime\[recipes\]"'):
        write_png(tmp_path / "step.png", SPANS)


def test_drawing_leaves_pyplot_alone(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it is an error
    write_png(tmp_path / "step.png", [Span("F1", "compute", 0.0, 1.0)])
    assert (tmp_path / "step.png").stat().st_size > 0


@pytest.mark.parametrize(("start_ms", "duration_ms"), [(0.0, -1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_a_span_checks_its_times(start_ms, duration_ms):
    with pytest.raises(ValueError, match=f"span 'F1' has .*duration_ms={duration_ms}"):
        Span("F1", "compute", start_ms, duration_ms)


def test_boxes_start_and_end_at_their_times():
    spans = [
        Span("W1", "compute", 1.0, 1.0),
        Span("F1", "compute", 0.0, 1.0),
        Span("mark", "compute", 0.5, 0.0),
        Span("S1", "network", 2.0, 2.0),
        Span("S2", "network", 5.0, 1.0),
    ]
    assert picture(spans, characters_per_ms=4) == "compute  |F1 |W1 |\nnetwork   .......|S1     |...|S2 |"
    thirds = [Span(f"F{i}", "compute", i / 3, 1 / 3) for i in range(1, 4)]
    assert picture(thirds, characters_per_ms=10) == "compute  |F1|F2 |F3|", "they meet where rounding would part them"
    assert picture([Span("backward", "compute", 0.0, 1.0)]) == "compute  |ba|"
    assert picture([]) == ""
    assert picture([Span("mark", "compute", 1.0, 0.0)]) == "compute"


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_a_scale_is_above_zero(scale):
    with pytest.raises(ValueError, match="characters_per_ms"):
        picture([Span("F1", "compute", 0.0, 1.0)], characters_per_ms=scale)


def test_overlaps_and_endless_lines_are_refused():
    with pytest.raises(ValueError, match="'F2' starts before"):
        picture([Span("F1", "compute", 0.0, 1.0), Span("F2", "compute", 0.5, 1.0)])
    with pytest.raises(ValueError, match="3000 characters long; give less"):
        picture([Span("F1", "compute", 0.0, 1000.0)])


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


@pytest.mark.parametrize(("write", "drawn"), [(write_png, []), (write_page, {}), (write_page, {"a": []})])
def test_nothing_is_refused(tmp_path, write, drawn):
    with pytest.raises(ValueError, match="nothing': there are no spans"):
        write(tmp_path / "nothing", drawn)
    assert not (tmp_path / "nothing").exists()


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
