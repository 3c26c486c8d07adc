"""The reports' charts: one look, labelled axes with units, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from retime.recipes.measure import Spread

# Colour-blind safe (Okabe and Ito); grey is for bounds and references.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8C564B", "#000000")
GREY = "#888888"
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


def panels(title: str, count: int, width: float = 11.0, height: float = 4.6, **options: Any) -> tuple[Any, Any]:
    """A figure with `count` charts side by side; `options` go to matplotlib's `subplots`."""
    drawing = Figure(figsize=(width, height), layout="constrained")
    drawing.suptitle(title, fontsize=11)
    row = drawing.subplots(1, count, **options)
    for axes in row:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return drawing, row


def save(drawing: Any, path: Path) -> None:
    """Write the chart as PNG, without a time stamp, so that an unchanged result gives an unchanged file."""
    drawing.savefig(path, dpi=130, metadata={"Software": None})


def stacked_bars(
    axes: Any, bars: Mapping[str, Mapping[str, float]], unit: str, totals: Mapping[str, Spread] | None = None
) -> None:
    """Horizontal bars of stacked parts; `bars` maps a bar's label to its parts. `totals` adds whiskers and numbers."""
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
            error = [[max(0.0, total.median - total.low)], [max(0.0, total.high - total.median)]]
            axes.errorbar(end, label, xerr=error, color="black", capsize=3, linewidth=1)
            edge = max(end, total.high)
            axes.annotate(
                f"{total.median:.4g}", (edge + 0.015 * reach, label), va="center", fontsize=9, annotation_clip=False
            )
        axes.set_xlim(0, reach * 1.12)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    if len(parts) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(parts), frameon=False)


def points_with_spread(
    axes: Any, places: Sequence[float], values: Sequence[Spread], label: str, index: int, *, line: bool = False
) -> str:
    """Markers with quartile whiskers at `places`; returns the colour, for a fitted line in the same one."""
    colour = COLOURS[index % len(COLOURS)]
    middle = [value.median for value in values]
    below = [max(0.0, value.median - value.low) for value in values]
    above = [max(0.0, value.high - value.median) for value in values]
    axes.errorbar(
        places,
        middle,
        yerr=[below, above],
        fmt=("-" if line else "") + _MARKERS[index % len(_MARKERS)],
        color=colour,
        label=label,
        capsize=3,
        markersize=6,
        linewidth=1.2,
    )
    return colour


def even_line(axes: Any, label: str) -> None:
    """The horizontal line at ratio 1."""
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle="--", label=label)


def plain_numbers(axis: Any) -> None:
    """Ticks 1, 2, 3, 5, 10 ... on a logarithmic axis, instead of powers of ten with factors."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
