"""`ooo_memory`: what reordering adds to the peak memory of training (section 8.3: less than 1 %)."""

from pathlib import Path
from typing import Any

from retime.recipes.core import charts
from retime.recipes.core.claims import Claim, Comparison
from retime.recipes.core.measure import Spread, spread
from retime.recipes.core.of_points import titled
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result
from retime.recipes.core.schema import OutOfOrderSettings
from retime.recipes.ooo.cases import case_of
from retime.recipes.ooo.cluster import FIRST_PEAK, MIB, PAPER, PEAK, OnRanks
from retime.recipes.ooo.variants import label

OVERHEAD = Claim(PAPER, "section 8.3", "%", 1.0, "memory that reordering adds, less than")


class Memory(CaseRecipe[OutOfOrderSettings], OnRanks):
    """Each case is a network; each variant's peak comes from fresh processes."""

    quantity = PEAK

    def references(self, point: Point) -> dict[str, str]:
        return {}

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = case_of(settings, at["case"])
        names = case.pop("variants", settings.variants)
        with self.network(settings, settings.hosts, case.pop("rate", settings.rate)) as network:
            rows, facts = self.peak_rows(settings, network, tick, names, **{**case, "k": None})
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            for name in point.variants(PEAK):
                if name.startswith("ooo_"):
                    remark = f"{point.at['case']}, {label(name)}; above an idle process with a group"
                    lines.append(Comparison(OVERHEAD, overhead_percent(point, name), remark))
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
        names = result.points[0].variants(PEAK)
        for index, name in enumerate(names):
            known = [(place, point) for place, point in enumerate(result.points) if point.has(name, PEAK)]
            shift = (index - (len(names) - 1) / 2) * 0.8 / len(names)
            values = [spread(point.values(name, PEAK)) for _, point in known]
            charts.points_with_spread(axes, [place + shift for place, _ in known], values, label(name), index)
        axes.set_xticks(range(len(result.points)), [point.at["case"] for point in result.points])
        axes.set_ylabel("peak memory of a fit (MiB), one rank")
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        charts.legend_beside(axes)
        charts.save(drawing, path)


def overhead_percent(point: Point, name: str) -> Spread | None:
    """Peak memory that a variant adds to plain DDP's, in percent, a value a round."""
    if not point.has(name, PEAK) or not point.has("ddp", PEAK):
        return None
    pairs = zip(point.values(name, PEAK), point.values("ddp", PEAK), strict=True)
    return spread([100 * (ours / plain - 1) for ours, plain in pairs])
