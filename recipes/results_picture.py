"""`results/claims.png`: a line a claim that is a speedup, the paper's value hollow, ours filled with its quartiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retime.recipes.core import charts
from retime.recipes.core.claims import KINDS
from retime.recipes.core.verdicts import Judged, Verdict
from retime.recipes.results_page import JudgedPaper, place

LEAST, MOST = 0.5, 5.0
"""Smaller values of papers are shares, and larger speedups have axes of their own, which would hide all others."""
NO_GAIN = (0.97, 1.03)
WIDTH, LINE = 10.5, 0.185
"""Inches: of the picture, 1,365 pixels, and of a line."""
LONGEST = 62
_COLOURS = dict(zip(KINDS, charts.COLOURS, strict=False))


def drawable(papers: Sequence[JudgedPaper]) -> dict[str, list[tuple[str, Judged]]]:
    """Claims that are speedups with a value of the paper and one of ours, by panel, each with its label."""
    panels: dict[str, list[tuple[str, Judged]]] = {one.paper.paper: [] for one in papers}
    large = f"more than {MOST:g} times"
    panels[large] = []
    for one in papers:
        for claim in one.claims:
            published = claim.published
            if published.unit != "x" or published.value is None or published.value < LEAST or not claim.values:
                continue
            label = f"{one.paper.letter}{published.number} {place(published)}: {published.what}"
            label = label if len(label) <= LONGEST else label[: LONGEST - 1].rstrip() + "…"
            most = max(published.value, *(value.measured.median for value in claim.values))
            panels[large if most > MOST else one.paper.paper].append((label, claim))
    return {name: lines for name, lines in panels.items() if lines}


def draw(papers: Sequence[JudgedPaper], path: Path) -> bool:
    """Draw the picture; False, and no picture, if no claim has a speedup on both sides."""
    panels = drawable(papers)
    if not panels:
        return False
    heights = [len(lines) + 1.5 for lines in panels.values()]
    title = "Speedups that the papers state, and ours beside them"
    height, count = LINE * sum(heights) + 1.6, len(panels)
    drawing, cells = charts.panels(title, count, WIDTH, height, rows=count, height_ratios=heights)
    for axes, (name, lines) in zip(cells, panels.items(), strict=True):
        _panel(axes, name, lines)
        if not name.startswith("more"):
            axes.set_xlim(LEAST, MOST * 1.05)
            charts.plain_numbers(axes.xaxis)
    cells[-1].set_xlabel("times as fast, or as small (logarithmic)")
    keys: list[Any] = [charts.marker_key("the paper", "o", filled=False)]
    used = {claim.kind for lines in panels.values() for _, claim in lines}
    keys += [charts.marker_key(f"ours, {kind}", "o", _COLOURS[kind]) for kind in KINDS if kind in used]
    keys.append(charts.colour_key("no gain", "#dddddd"))
    drawing.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=len(keys))
    charts.save(drawing, path)
    return True


def _panel(axes: Any, name: str, lines: Sequence[tuple[str, Judged]]) -> None:
    axes.set_title(name, fontsize=10, loc="left")
    axes.set_xscale("log")
    axes.axvspan(*NO_GAIN, color="#dddddd", zorder=0)
    for number, (_, claim) in enumerate(lines):
        style = {"fmt": "o", "color": _COLOURS[claim.kind], "markersize": 4, "linewidth": 1, "capsize": 2}
        for ours in (value.measured for value in claim.values):
            whisker = [[ours.median - ours.low], [ours.high - ours.median]]
            axes.errorbar(ours.median, number, xerr=whisker, **style)
        axes.plot(
            claim.published.value, number, "o", markersize=7, markerfacecolor="none", markeredgecolor="black", zorder=3
        )
        colour = charts.GREY if claim.verdict is not Verdict.FAILS else "#B03A2E"
        beside = {"xycoords": ("axes fraction", "data"), "va": "center"}
        axes.annotate(claim.verdict.value, (1.005, number), fontsize=7, color=colour, **beside)
    axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=7)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=8)
