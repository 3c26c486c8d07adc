"""Figures 15 and 16 of moDNN: power and energy of training inside budgets, where the machine has a meter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, spread
from retime.foundations.workers import Worker
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.modnn import claims
from retime.recipes.modnn.energy_meter import NoMeterError, Watch, find_meter
from retime.recipes.modnn.over_networks import NetworkRecipe
from retime.recipes.modnn.report import budgets_of
from retime.recipes.modnn.settings import MemorySettings
from retime.recipes.modnn.side_by_side import BUDGET, STEP, UNLIMITED, block_ms, side_by_side

ENERGY, MEAN, MOST = "energy a step", "average power", "most power"
NO_METER, METER = "no meter", "meter"
_PANELS = {MEAN: "average power (Figure 15)", MOST: "most power (Figure 15)", ENERGY: "energy (Figure 16)"}


class Power(NetworkRecipe):
    """A point a network; a variant a budget. Without a meter a point holds the reason and no number."""

    quantity = ENERGY

    def references(self, point: Point) -> dict[str, str]:
        return {"unlimited's energy over its own": UNLIMITED}

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        try:
            meter = find_meter(settings.hardware.device, Path(settings.powercap))
        except NoMeterError as error:
            return Measured([], {NO_METER: str(error)})
        seen: dict[str, list[Watch]] = {}

        def block(worker: Worker, steps: int, name: str, facts: dict[str, Any]) -> float:
            with meter.watching() as watch:
                step_ms = block_ms(worker, steps, name, facts)
            seen.setdefault(name, []).append(watch)
            return step_ms

        rows, facts = side_by_side(settings, settings.cases[at["network"]], settings.budgets, tick, block)
        for name, watches in seen.items():
            if any(row.variant == name and row.quantity == STEP for row in rows):
                measured = watches[settings.warmup_rounds :]
                rows += [
                    Row(name, ENERGY, "J", [watch.joules / settings.steps for watch in measured]),
                    Row(name, MEAN, "W", [watch.mean_watts for watch in measured]),
                    Row(name, MOST, "W", [watch.max_watts for watch in measured]),
                ]
        return Measured(rows, {METER: meter.source, **facts})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            if NO_METER in point.facts:
                lines.append(
                    Comparison(claims.claim("figure-15"), None, f"{point.at['network']}: {point.facts[NO_METER]}")
                )
                continue
            for name in budgets_of(point):
                added = [100 * (value - 1) for value in relative(point, name, MEAN).rounds]
                lines.append(Comparison(claims.claim("figure-15"), spread(added), f"{point.at['network']}, {name}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            "Energy is what the meter counted while a block of steps ran, over its steps. RAPL counts whole processor "
            "packages, so also what else they do; NVML counts the whole board.",
            "Figure 15 shows maximum power too, but section 7.4 gives no number for it, only that it falls with the "
            "sub-batch size where the batch no longer fits whole: it is drawn, and there is no line to compare.",
            *(
                "- " + (_not_measured(point) or f"{point.at['network']}: {point.facts[METER]}")
                for point in result.points
            ),
        ]

    def draw(self, result: Result, path: Path) -> None:
        quantities = [quantity for quantity in _PANELS if any(_places(point, quantity) for point in result.points)]
        if not quantities:
            reasons = [
                _not_measured(point) or f"{point.at['network']}: trained in no budget" for point in result.points
            ]
            charts.save(charts.only_text(result.title, reasons or ["nothing was measured"]), path)
            return
        drawing, panels = charts.panels(titled(result), len(quantities), width=5.0 * len(quantities))
        for axes, quantity in zip(panels, quantities, strict=True):
            for index, point in enumerate(result.points):
                places = _places(point, quantity)
                values = [relative(point, name, quantity) for name in places]
                if values:
                    charts.points_with_spread(
                        axes, list(places.values()), values, point.at["network"], index, line=True
                    )
            axes.set_xlabel("budget (% of the ideal peak)")
            axes.set_ylabel(f"{_PANELS[quantity]} over unlimited")
            axes.invert_xaxis()
            charts.even_line(axes, "unlimited")
            axes.legend(fontsize=8)
        charts.save(drawing, path)


def _not_measured(point: Point) -> str | None:
    """What a report says of a machine without a meter."""
    if NO_METER not in point.facts:
        return None
    return f"{point.at['network']}: not measured, because this machine has no meter: {point.facts[NO_METER]}"


def _places(point: Point, quantity: str) -> dict[str, float]:
    """The budgets with this quantity, in percent of the ideal peak."""
    return {
        name: 100 * point.values(name, BUDGET)[0] / point.facts["ideal peak MiB"]
        for name in budgets_of(point)
        if point.has(name, quantity)
    }


def relative(point: Point, name: str, quantity: str) -> Spread:
    """A budget's value over the unlimited one, in each round."""
    pairs = zip(point.values(name, quantity), point.values(UNLIMITED, quantity), strict=True)
    return spread([ours / plain for ours, plain in pairs])
