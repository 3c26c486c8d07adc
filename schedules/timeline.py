"""Timelines: text for a terminal, a PNG chart, a page for a browser, and a Chrome trace for https://ui.perfetto.dev.

All writers take plain spans, so simulated and measured timelines share them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retime.schedules.schedule import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_US_PER_MS = 1000.0
_PROCESS_ID = 0
# A label that would be wider than its bar hides its neighbours; below this share of the chart it is left out.
_LABEL_SHARE_PER_CHARACTER = 0.0075
_TASK = re.compile(r"[A-Z](\d+)(?:@(\d+))?('*)")  # Task's text form, of further kinds too

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8C564B", "#000000")
"""Of charts; the colour-blind can tell them apart (Okabe and Ito)."""
_COLOUR_OF_KIND = dict(zip((kind.words for kind in Kind), COLOURS, strict=False)) | {"idle": "#999999"}


@dataclass(frozen=True)
class Span:
    """One box on a timeline.

    Args:
        name: the label, for example ``"F1"``.
        lane: the row it is drawn in: a resource such as ``"compute"`` or ``"network"``, or a rank.
        start_ms: start in milliseconds on the timeline's clock.
        duration_ms: length in milliseconds; 0 marks an instant.
        category: groups spans by colour and in the legend; empty for no group.

    Raises:
        ValueError: when a time is not finite or the duration is negative.
    """

    name: str
    lane: str
    start_ms: float
    duration_ms: float
    category: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_ms) and math.isfinite(self.duration_ms)):
            raise ValueError(
                f"span {self.name!r} has start_ms={self.start_ms} and duration_ms={self.duration_ms}: "
                "both must be finite numbers of milliseconds"
            )
        if self.duration_ms < 0:
            raise ValueError(
                f"span {self.name!r} has duration_ms={self.duration_ms}: give a duration of 0 or more milliseconds"
            )

    @property
    def end_ms(self) -> float:
        """End in milliseconds on the timeline's clock."""
        return self.start_ms + self.duration_ms


def colours_of(spans: Iterable[Span]) -> dict[str, str]:
    """Return a colour for each category: for the kinds of tasks always the same, for others what is left."""
    categories = dict.fromkeys(span.category for span in spans)
    taken = {_COLOUR_OF_KIND.get(category) for category in categories}
    others = cycle(colour for colour in COLOURS if colour not in taken)
    return {category: _COLOUR_OF_KIND.get(category) or next(others) for category in categories}


def write_chrome_trace(path: str | os.PathLike[str], spans: Iterable[Span], *, process_name: str = "retime") -> None:
    """Write ``spans`` as a Chrome trace (JSON object format), which ui.perfetto.dev and chrome://tracing open.

    A lane becomes a named thread, lanes keep the order in which they first appear, and times become microseconds, the
    format's unit.

    Args:
        path: the file to write; missing folders are made.
        spans: the boxes; an empty list gives a valid, empty trace.
        process_name: the title above the lanes.
    """
    spans = list(spans)
    thread_of = {lane: index for index, lane in enumerate(_lanes(spans))}
    events: list[dict[str, Any]] = [_metadata("process_name", 0, {"name": process_name})]
    for lane, thread in thread_of.items():
        events.append(_metadata("thread_name", thread, {"name": lane}))
        events.append(_metadata("thread_sort_index", thread, {"sort_index": thread}))
    events += [
        {
            "name": span.name,
            "cat": span.category or "task",
            "ph": "X",  # a complete event: start and duration in one record
            "pid": _PROCESS_ID,
            "tid": thread_of[span.lane],
            "ts": span.start_ms * _US_PER_MS,
            "dur": span.duration_ms * _US_PER_MS,
        }
        for span in sorted(spans, key=lambda span: span.start_ms)
    ]
    target = _prepare(path)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1, allow_nan=False)
    target.write_text(text + "\n", encoding="utf-8")


def write_png(path: str | os.PathLike[str], spans: Iterable[Span], *, title: str = "", time_unit: str = "ms") -> None:
    """Draw ``spans`` as a Gantt chart: one row a lane, one colour a category.

    Args:
        path: the file to write, PNG whatever its suffix; missing folders are made.
        spans: the boxes; at least one.
        title: a line above the chart.
        time_unit: what a millisecond of the spans stands for, below the axis.

    Raises:
        ImportError: when matplotlib is not installed, with the command that installs it.
        ValueError: when there are no spans to draw.
    """
    spans = list(spans)
    if not spans:
        raise ValueError(f"cannot draw {os.fspath(path)!r}: there are no spans; give at least one")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'write_png draws with matplotlib, which is not installed: pip install "lightning-retime[recipes]"'
        ) from error

    lanes = _lanes(spans)
    figure = Figure(figsize=(12.0, 1.6 + 0.55 * len(lanes)), dpi=116, layout="constrained")
    FigureCanvasAgg(figure)  # Figure plus its own canvas: pyplot would touch state that the user's code shares
    axes = figure.subplots()
    _draw(axes, spans, lanes, title)
    axes.set_xlabel(f"time ({time_unit})")
    figure.savefig(_prepare(path), format="png")


def write_page(
    path: str | os.PathLike[str],
    charts: Mapping[str, Iterable[Span]],
    *,
    title: str = "",
    unit: str = "layer",
    idle: str = "",
    above: str = "",
    below: str = "",
) -> None:
    """Write a page of HTML that needs nothing else: timelines to zoom into, with names in words and durations.

    Args:
        path: the file to write; missing folders are made.
        charts: spans by what stands above them, a chart each.
        title: above all charts.
        unit: what the number in a name such as ``"F2@1"`` counts; names of another form stand as they are.
        idle: what to call the share of a lane's time without a task, from its first task to its last, such as
            ``"bubble"``; empty leaves it out.
        above: HTML between title and charts; a page that has some needs no chart.
        below: HTML behind the charts.

    Raises:
        ValueError: when a chart has no spans.
    """
    listed = {name: list(spans) for name, spans in charts.items()}
    empty = next((name for name, spans in listed.items() if not spans), None)
    if empty is not None or not (listed or above):
        raise ValueError(f"cannot draw {os.fspath(path)!r}: there are no spans in chart {empty!r}; give at least one")
    data = {
        "title": title,
        "colours": colours_of(span for spans in listed.values() for span in spans),
        "charts": [_chart(name, spans, unit, idle) for name, spans in listed.items()],
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", r"\u003c")  # a name may hold </script>
    page = Path(__file__).with_suffix(".html").read_text("utf-8").replace(">DATA<", f">{text}<")
    page = page.replace("<!-- below -->", below).replace("<!-- above -->", above)
    _prepare(path).write_text(page, encoding="utf-8")


def _chart(name: str, spans: Sequence[Span], unit: str, idle: str) -> dict[str, Any]:
    lanes = _lanes(spans)
    shares = []
    for lane in lanes:
        there = [span for span in spans if span.lane == lane]
        whole = max(span.end_ms for span in there) - min(span.start_ms for span in there)
        share = 1 - sum(span.duration_ms for span in there) / whole if whole else 0.0
        shares.append(f": {idle} {max(0.0, share):.0%}" if idle else "")
    begin_ms, end_ms = _range(spans)
    boxes = [
        [span.name, _in_words(span, unit), lanes.index(span.lane), span.start_ms, span.duration_ms, span.category]
        for span in spans
    ]
    return {"name": name, "lanes": lanes, "shares": shares, "range": [begin_ms, end_ms], "spans": boxes}


def _in_words(span: Span, unit: str) -> str:
    task = _TASK.fullmatch(span.name)
    if task is None or not span.category:
        return span.name
    number, micro_batch, later = task.groups()
    part = "" if micro_batch is None else f", micro-batch {micro_batch}"
    return f"{span.category} of {unit} {number}{part}{', next step' if later else ''}"


def _draw(axes: Axes, spans: Sequence[Span], lanes: Sequence[str], title: str) -> None:
    from matplotlib.patches import Patch

    colour_of = colours_of(spans)
    row_of = {lane: index for index, lane in enumerate(lanes)}
    begin_ms, end_ms = _range(spans)
    width_ms = end_ms - begin_ms

    for span in spans:
        row = row_of[span.lane]
        colour = colour_of[span.category]
        if span.duration_ms == 0:
            axes.plot([span.start_ms], [row], marker="D", color=colour, markersize=5)
            continue
        axes.barh(row, span.duration_ms, left=span.start_ms, height=0.8, color=colour, edgecolor="white", linewidth=0.5)
        if span.duration_ms / width_ms >= _LABEL_SHARE_PER_CHARACTER * len(span.name):
            centre_ms = span.start_ms + span.duration_ms / 2
            # parse_math off: names are text, and a `$` in one must not start a formula
            axes.text(centre_ms, row, span.name, ha="center", va="center", fontsize=8, color="white", parse_math=False)

    axes.set_xlim(begin_ms - 0.01 * width_ms, begin_ms + 1.01 * width_ms)
    axes.set_ylim(len(lanes) - 0.5, -0.5)  # first lane on top
    axes.set_yticks(range(len(lanes)))
    axes.set_yticklabels(lanes, parse_math=False)
    if title:
        axes.set_title(title, parse_math=False)
    named = [category for category in colour_of if category]
    if named:
        handles = [Patch(color=colour_of[category], label=category) for category in named]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _range(spans: Sequence[Span]) -> tuple[float, float]:
    """Return where a chart begins and ends; one of instants only has no width of its own, and gets a millisecond."""
    begin_ms, end_ms = min(span.start_ms for span in spans), max(span.end_ms for span in spans)
    return begin_ms, end_ms if end_ms > begin_ms else begin_ms + 1.0


def _lanes(spans: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(span.lane for span in spans))


def _metadata(name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS_ID, "tid": thread, "args": arguments}


def _prepare(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


MOST_CHARACTERS = 1000
"""A line that is longer says that `characters_per_ms` does not suit the timeline."""


def picture(spans: Iterable[Span], *, characters_per_ms: float = 3.0) -> str:
    """Draw ``spans`` as text: a lane a line, ``|`` where a task starts, dots where the lane waits.

    >>> from retime.schedules import reverse_first_k, simulate
    >>> ran = simulate(reverse_first_k(2, 2), {"F": 1, "O": 1, "W": 1, "S": 2}, {"S": "network"})
    >>> print(picture(ran.spans))
    compute  |F1|F2|O2|W1|W2|
    network   ...........|S1   |S2   |

    Args:
        spans: the boxes; those of one lane must not overlap. Instants (0 ms) are left out.
        characters_per_ms: the scale. A box that is too narrow for its name shows as much of the name as fits.

    Raises:
        ValueError: when the scale is no positive number, two boxes of a lane overlap, or a line would be longer than
            1000 characters.
    """
    if not characters_per_ms > 0:
        raise ValueError(f"characters_per_ms={characters_per_ms}: give a number above 0")
    lanes: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ms):
        lanes.setdefault(span.lane, [])
        if span.duration_ms > 0:
            lanes[span.lane].append(span)
    begin_ms = min((span.start_ms for boxes in lanes.values() for span in boxes), default=0.0)
    width = max(map(len, lanes), default=0)
    return "\n".join(
        f"{lane:{width}}  {_line(boxes, begin_ms, characters_per_ms)}".rstrip() for lane, boxes in lanes.items()
    )


def _line(boxes: list[Span], begin_ms: float, scale: float) -> str:
    line, free_ms = "", begin_ms
    for box in boxes:
        start, end = round((box.start_ms - begin_ms) * scale), round((box.end_ms - begin_ms) * scale)
        if box.start_ms < free_ms - 1e-9:
            raise ValueError(f"{box.name!r} starts before the box in front of it ends, on lane {box.lane!r}")
        if end > MOST_CHARACTERS:
            raise ValueError(f"characters_per_ms={scale}: {box.lane!r} would be {end} characters long; give less")
        if start > len(line):
            line += ("|" if line else " ") + "." * (start - len(line) - 1)  # a wait
        line = f"{line:{start}}"[:start] + f"|{box.name}"[: end - start].ljust(end - start)
        free_ms = box.end_ms
    return f"{line}|" if line else line
