"""`cpuacc_fig3`: Figures 3 and 4 and Table 3: time of an iteration, weak scaling, and where the time goes.

The paper's ranks are GPUs; these are processes on cores. Its baseline is the naive way, `NaiveDDP` here, and torch's
DDP is a stronger peer. One rank that trains alone runs on every rank at the same time, so that what ranks lose by
sharing cores and memory is in the reference, and what is left is communication.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, speedup, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, titled
from retime.recipes.cpuacc.naive import NAIVE
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.targets import STEP, OnRanks, best_of, claim, measure_fits, place
from retime.recipes.cpuacc.worker import ALONE

EXPOSED, UPDATE = "communication exposed", "update"


class Figures(OnRanks):
    """A point a network and number of ranks."""

    quantity = STEP

    def references(self, point: Point) -> dict[str, str]:
        peers = (best_of(point, "ddp", STEP), NAIVE)
        return {f"speed over {peer}": peer for peer in peers if peer is not None and point.has(peer, STEP)}

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        return measure_fits(settings, at, tick)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            ours, theirs = best_of(point, "cpu_accumulate", STEP), best_of(point, "ddp", STEP)
            if ours is None or theirs is None:
                continue
            where = place(point)
            if point.at["network"] in ("AlexNet", "GoogLeNet", "VGG-16"):
                figure_3 = claim(f"figure-3 {point.at['network']}")
                ratio, note = speedup(point.values(theirs, STEP), point.values(ours, STEP)), f"{ours} over {theirs}"
                lines.append(Comparison(figure_3, ratio, f"{where}: {note}"))
                if point.has(NAIVE, STEP):
                    ratio = speedup(point.values(NAIVE, STEP), point.values(ours, STEP))
                    lines.append(Comparison(figure_3, ratio, f"{where}, over {NAIVE}: {ours}"))
            scaling, ways = claim("scaling"), (ours, theirs, *([NAIVE] if point.has(NAIVE, STEP) else []))
            lines += [Comparison(scaling, efficiency(point, label), f"{where}: {label}") for label in ways]
            for label, when in ((theirs, "before"), (ours, "after")):
                if point.at["network"] == "AlexNet" and point.has(label, EXPOSED):
                    exposed = spread(point.values(label, EXPOSED))
                    lines.append(Comparison(claim(f"exposed-{when}"), exposed, f"{where}: {label}"))
            if point.at["network"] == "AlexNet" and point.has(NAIVE, EXPOSED):
                collected, there = (point.values(NAIVE, phase)[0] for phase in (EXPOSED, UPDATE))
                whole = collected + there - point.values(theirs, UPDATE)[0]
                lines.append(Comparison(claim("exposed-before"), spread([whole]), f"{where}: {NAIVE}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Efficiency is the step of a rank that trains alone, beside as many others that do, over the step. What "
            "communication leaves exposed is what the step waits for at the end of the backward pass; of the naive way "
            "the weights' broadcast is beside it, in the update.",
        ]
        for point in result.points:
            same = ", ".join(point.facts["the same final weights"])
            mib = point.facts["gradient bytes"] / 2**20
            lines.append(
                f"- {place(point)} on {point.facts['cores']} cores, {mib:.0f} MiB of gradients: the same final "
                f"weights, bit by bit: {same}"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        names = list(dict.fromkeys(point.at["network"] for point in result.points))
        drawing, panels = charts.panels(titled(result), 2 * len(names), width=10.5, height=7.6, rows=2)
        for number, name in enumerate(names):
            points = sorted((p for p in result.points if p.at["network"] == name), key=lambda p: int(p.at["ranks"]))
            times, scaling = panels[number], panels[len(names) + number]
            labels = dict.fromkeys(label for point in points for label in point.variants(STEP))
            for index, label in enumerate(labels):
                ranks = [point.at["ranks"] for point in points if point.has(label, STEP)]
                steps = [spread(point.values(label, STEP)) for point in points if point.has(label, STEP)]
                charts.points_with_spread(times, ranks, steps, label, index, line=True)
                if label != ALONE:
                    shares = [efficiency(point, label) for point in points if point.has(label, STEP)]
                    charts.points_with_spread(scaling, ranks, shares, label, index, line=True)
            charts.even_line(scaling, ALONE)
            least, axis = claim("scaling").value, ("axes fraction", "data")
            scaling.axhline(least, color=charts.GREY, linewidth=1, linestyle=":")
            scaling.annotate(f"the paper's: more than {least:g}", (0.25, least), xycoords=axis, fontsize=7, va="bottom")
            for axes, what in ((times, "iteration (ms)"), (scaling, "weak scaling efficiency")):
                axes.set_ylim(bottom=0)
                axes.set_title(name, fontsize=10)
                axes.set_xlabel("ranks")
                axes.set_ylabel(what)
                axes.set_xticks([point.at["ranks"] for point in points])
        charts.legend_below(drawing, panels[0], columns=3)
        charts.save(drawing, path)


def efficiency(point: Point, label: str) -> Spread:
    """Weak scaling: a rank's step alone over its step among others, 1 is no loss."""
    return speedup(point.values(ALONE, STEP), point.values(label, STEP))
