"""Timelines as files: a PNG Gantt chart and a Chrome trace that Perfetto (https://ui.perfetto.dev) opens.

Both writers take plain spans, so simulated and measured timelines share them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_US_PER_MS = 1000.0
_PROCESS_ID = 0
# A label that would be wider than its bar hides its neighbours; below this share of the chart it is left out.
_LABEL_SHARE_PER_CHARACTER = 0.0075


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


def write_png(path: str | os.PathLike[str], spans: Iterable[Span], *, title: str = "") -> None:
    """Draw ``spans`` as a Gantt chart: one row a lane, one colour a category, time in milliseconds.

    Args:
        path: the file to write, PNG whatever its suffix; missing folders are made.
        spans: the boxes; at least one.
        title: a line above the chart.

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
    figure = Figure(figsize=(12.0, 1.6 + 0.55 * len(lanes)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # Figure plus its own canvas: pyplot would touch state that the user's code shares
    _draw(figure.subplots(), spans, lanes, title)
    figure.savefig(_prepare(path), format="png")


def _draw(axes: Axes, spans: Sequence[Span], lanes: Sequence[str], title: str) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    palette = colormaps["tab10"]
    categories = list(dict.fromkeys(span.category for span in spans))
    colour_of = {category: palette(index % 10) for index, category in enumerate(categories)}
    row_of = {lane: index for index, lane in enumerate(lanes)}
    begin_ms = min(span.start_ms for span in spans)
    # A chart of instants only has no width of its own; one millisecond keeps the axis readable.
    width_ms = (max(span.end_ms for span in spans) - begin_ms) or 1.0

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
    axes.set_xlabel("time (ms)")
    if title:
        axes.set_title(title, parse_math=False)
    named = [category for category in categories if category]
    if named:
        handles = [Patch(color=colour_of[category], label=category) for category in named]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _lanes(spans: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(span.lane for span in spans))


def _metadata(name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS_ID, "tid": thread, "args": arguments}


def _prepare(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
