"""`ooo_memory`: what reordering adds to the peak memory of training (section 8.3: less than 1 %)."""

from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, titled
from retime.recipes.ooo.cases import of_case
from retime.recipes.ooo.claims import claim
from retime.recipes.ooo.cluster import FIRST_PEAK, MIB, PEAK, OnRanks
from retime.recipes.ooo.settings import OutOfOrderSettings
from retime.recipes.ooo.variants import label


class Memory(CaseRecipe[OutOfOrderSettings], OnRanks):
    """Each case is a network; each variant's peak comes from fresh processes."""

    quantity = PEAK

    def references(self, point: Point) -> dict[str, str]:
        return {}

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        return self.peaks(of_case(settings, at["case"]), tick)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            for name in point.variants(PEAK):
                if name.startswith("ooo_"):
                    remark = f"{point.at['case']}, {label(name)}; above an idle process with a group"
                    lines.append(Comparison(claim("memory"), overhead_percent(point, name), remark))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            f"- {point.at['case']}: the gradients have {point.facts['gradient bytes'] / MIB:.1f} MiB; "
            f"plain DDP's peak is {spread(point.values('ddp', PEAK)).median:.1f} MiB"
            for point in result.points
            if point.has("ddp", PEAK)
        ] + [
            f"- {point.at['case']}: in the first steps, in which DDP builds its buckets anew, {label(name)} peaks at "
            f"{spread(point.values(name, FIRST_PEAK)).median:.1f} MiB"
            for point in result.points
            for name in point.variants(FIRST_PEAK)
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result))
        points = [point for point in result.points if point.has("ddp", PEAK)]
        names = [name for name in result.points[0].variants(PEAK) if name != "ddp"]
        for index, name in enumerate(names):
            shift = (index - (len(names) - 1) / 2) * 0.8 / len(names)
            known = [(place + shift, overhead_percent(point, name)) for place, point in enumerate(points)]
            places, values = [x for x, value in known if value], [value for _, value in known if value]
            charts.points_with_spread(axes, places, values, label(name), index)
        peaks = [f"{point.at['case']}\nDDP: {spread(point.values('ddp', PEAK)).median:.0f} MiB" for point in points]
        axes.set_xticks(range(len(points)), peaks)
        axes.axhline(0, color=charts.GREY, linewidth=1, linestyle="--", label="DDP")
        axes.axhline(
            claim("memory").value, color=charts.GREY, linewidth=1, linestyle=":", label="the paper's: less than this"
        )
        axes.set_ylabel("peak memory of a fit over DDP's, one rank (%)")
        charts.legend_beside(axes)
        charts.save(drawing, path)


def overhead_percent(point: Point, name: str) -> Spread | None:
    """Peak memory that a variant adds to plain DDP's, in percent, a value a round."""
    if not point.has(name, PEAK) or not point.has("ddp", PEAK):
        return None
    pairs = zip(point.values(name, PEAK), point.values("ddp", PEAK), strict=True)
    return spread([100 * (ours / plain - 1) for ours, plain in pairs])
