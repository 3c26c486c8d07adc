"""The reports' charts: one look, labelled axes with units, drawn without a display."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from retime.foundations.measure import Spread
from retime.schedules import COLOURS as COLOURS

GREY = "#888888"
"""For bounds and references."""
DPI, MOST_PIXELS = 130, 1400
"""Pixels an inch, fewer where a picture would be wider than a page shows."""
_MARKERS = "osD^vPX*"


def figure(title: str, width: float = 8.0, height: float = 4.5) -> tuple[Any, Any]:
    """An empty chart: the matplotlib figure and its axes."""
    drawing = Figure(figsize=(width, height), layout="constrained")
    axes = drawing.add_subplot()
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return drawing, axes


def panels(
    title: str, count: int, width: float = 11.0, height: float = 4.6, *, rows: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """A figure with `count` charts side by side, in `rows` rows; `options` go to matplotlib's `subplots`."""
    drawing = Figure(figsize=(width, height), layout="constrained")
    drawing.suptitle(title, fontsize=11)
    cells = list(drawing.subplots(rows, -(-count // rows), squeeze=False, **options).flat)
    for axes in cells[count:]:
        axes.remove()
    for axes in cells[:count]:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return drawing, cells[:count]


def one_or_panels(title: str, count: int, **options: Any) -> tuple[Any, list[Any]]:
    """An empty chart if there is one to draw, else charts side by side."""
    if count > 1:
        return panels(title, count, **options)
    drawing, axes = figure(title)
    return drawing, [axes]


def only_text(title: str, lines: Sequence[str]) -> Any:
    """A figure without a chart, which says why there is none."""
    drawing = Figure(figsize=(8.0, 1.0 + 0.5 * len(lines)), layout="constrained")
    drawing.suptitle(title, fontsize=11)
    drawing.text(0.5, 0.4, "\n".join(fill(line, 90) for line in lines), ha="center", va="center", fontsize=10)
    return drawing


def save(drawing: Any, path: Path) -> None:
    """Write the chart as PNG, without a time stamp, so that an unchanged result gives an unchanged file."""
    dpi = min(DPI, MOST_PIXELS / drawing.get_size_inches()[0])
    drawing.savefig(path, dpi=dpi, metadata={"Software": None})


def stacked_bars(
    axes: Any, bars: Mapping[str, Mapping[str, float]], unit: str, totals: Mapping[str, Spread] | None = None
) -> None:
    """Horizontal bars of stacked parts; `bars` maps a bar's label to its parts.

    `totals` adds the number, quartiles as a whisker and the median as its dot: medians of parts need not add up to it.
    """
    labels = list(bars)
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    left = [0.0] * len(labels)
    for colour, part in zip(COLOURS, parts, strict=False):
        widths = [bars[label].get(part, 0.0) for label in labels]
        axes.barh(labels, widths, left=left, color=colour, label=part, height=0.65)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if totals is not None:
        reach = max(*left, *(total.high for total in totals.values()))
        for label, end in zip(labels, left, strict=True):
            total = totals[label]
            error, edge = _whiskers([total]), max(end, total.high) + 0.015 * reach
            axes.errorbar(total.median, label, xerr=error, fmt="ko", markersize=3, capsize=3, linewidth=1)
            axes.annotate(f"{total.median:.4g}", (edge, label), va="center", fontsize=9, annotation_clip=False)
        axes.set_xlim(0, reach * 1.12)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    if len(parts) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(parts), frameon=False)


def pairs(axes: Any, values: Mapping[str, Sequence[float]]) -> None:
    """Groups of two bars with their values; `values` maps a bar's label to its height in each group."""
    for index, (label, heights) in enumerate(values.items()):
        places = [place + 0.4 * (index - 0.5) for place in range(len(heights))]
        axes.bar(places, heights, 0.38, color=COLOURS[index], label=label)
        for at in zip(places, heights, strict=True):
            text = axes.annotate(f"{at[1]:.2f}", at, ha="center", va="bottom", fontsize=7)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.2})
    axes.grid(axis="x", visible=False)


def lanes(axes: Any, boxes: Iterable[Sequence[Any]], names: Mapping[str, str], *, apart: str = "") -> None:
    """Boxes (number of the colour, lane, start, end) on lanes, the first of `names` lowest.

    Boxes of the lane `apart` have white edges, where they touch one another.
    """
    groups: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for colour, lane, start, end in boxes:
        groups.setdefault((colour, lane), []).append((start, end - start))
    for (colour, lane), bars in groups.items():
        # without snapping, boxes below a pixel are pale; with it, many of them are not drawn at all
        edge = {"edgecolor": "white", "linewidth": 0.8 if lane == apart else 0, "snap": False}
        axes.broken_barh(bars, ([*names].index(lane) - 0.4, 0.8), facecolor=COLOURS[colour], **edge)
    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.set_yticks(range(len(names)), names.values())
    axes.grid(visible=False)


def points_with_spread(
    axes: Any,
    places: Sequence[float],
    values: Sequence[Spread | None],
    label: str | None,
    index: int,
    *,
    line: bool = False,
    marker: str | None = None,
    filled: bool = True,
) -> str:
    """Markers with quartile whiskers at `places`; returns the colour, for a fitted line in the same one.

    What was not measured, None among `values`, has none. `marker` is that of `index` unless given. Without a `label`
    the legend leaves them out.
    """
    colour = COLOURS[index % len(COLOURS)]
    there = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
    axes.errorbar(
        [place for place, _ in there],
        [value.median for _, value in there],
        yerr=_whiskers([value for _, value in there]),
        fmt=("-" if line else "") + (marker or _MARKERS[index % len(_MARKERS)]),
        color=colour,
        markerfacecolor=colour if filled else "white",
        label=label or "_nolegend_",
        capsize=3,
        markersize=6,
        linewidth=1.2,
    )
    return colour


def beside(axes: Any, series: Sequence[tuple[str, Sequence[Spread | None]]], apart: float) -> None:
    """Markers with whiskers of each series at 0, 1, 2 ..., side by side, each in another colour."""
    for index, (label, values) in enumerate(series):
        shift = apart * (index - (len(series) - 1) / 2)
        points_with_spread(axes, [place + shift for place in range(len(values))], values, label, index)


def named(axes: Any, values: Mapping[str, Spread], colours: Sequence[int] = ()) -> None:
    """A marker with whiskers for each name, each in another colour unless there are numbers of colours."""
    for place, value in enumerate(values.values()):
        points_with_spread(axes, [place], [value], None, colours[place] if colours else place)
    axes.set_xticks(range(len(values)), list(values), rotation=40, ha="right", fontsize=8)


def bars(axes: Any, values: Mapping[str, Spread], colours: Sequence[int], rotation: float) -> None:
    """A bar with whiskers for each name, in the colours of these numbers."""
    for place, (value, colour) in enumerate(zip(values.values(), colours, strict=True)):
        axes.bar(place, value.median, width=0.65, color=COLOURS[colour])
        axes.errorbar(place, value.median, yerr=_whiskers([value]), color="black", capsize=3, linewidth=1)
    axes.set_xticks(range(len(values)), list(values), rotation=rotation, ha="right", fontsize=8)
    axes.grid(axis="x", visible=False)


def _whiskers(values: Sequence[Spread]) -> list[list[float]]:
    """Distances of quartiles below and above medians."""
    below = [max(0.0, value.median - value.low) for value in values]
    return [below, [max(0.0, value.high - value.median) for value in values]]


def marker_key(label: str, marker: str, colour: str = GREY, *, filled: bool = True) -> Line2D:
    """A legend's entry for what a marker means, whatever its colour."""
    face = colour if filled else "none"
    return Line2D([], [], linestyle="", marker=marker, color=colour, markerfacecolor=face, label=label)


def colour_key(label: str, colour: str) -> Patch:
    """A legend's entry for what a colour means, whatever the marker."""
    return Patch(color=colour, label=label)


def colour_legend(drawing: Any, labels: Sequence[str], **options: Any) -> None:
    """Draw what each colour in turn means, below all charts; `options` go to matplotlib's `legend`."""
    keys = [colour_key(*pair) for pair in zip(labels, COLOURS, strict=False)]
    drawing.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=len(keys), **options)


def legend_beside(axes: Any) -> None:
    """The legend to the right of the chart, where it covers nothing."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def legend_below(drawing: Any, axes: Any, columns: int, **options: Any) -> None:
    """The legend of one of the charts, below all of them; `options` go to matplotlib's `legend`."""
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=columns, **options)


def even_line(axes: Any, label: str) -> None:
    """The horizontal line at ratio 1."""
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle="--", label=label)


def whole_ticks(axes: Any, label: str) -> None:
    """A horizontal axis of things that are counted: no halves of them."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)


def plain_numbers(axis: Any) -> None:
    """Ticks 1, 2, 3, 5, 10 ... on a logarithmic axis, instead of powers of ten with factors."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
