"""Figures 15 and 16 of moDNN: power and energy of training inside budgets, where the machine has a meter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retime.mechanisms.energy_meter import NoMeterError, Watch, find_meter
from retime.recipes import charts
from retime.recipes import modnn_claims as claims
from retime.recipes.claims import Comparison
from retime.recipes.measure import Spread, spread
from retime.recipes.modnn_processes import Worker
from retime.recipes.modnn_recipe import NetworkRecipe
from retime.recipes.modnn_report import budgets_of
from retime.recipes.modnn_side_by_side import BUDGET, STEP, UNLIMITED, block_ms, side_by_side
from retime.recipes.recipe import Measured, Tick
from retime.recipes.results import Point, Result, Row
from retime.recipes.schema import MemorySettings

ENERGY, MEAN, MOST = "energy a step", "average power", "most power"
NO_METER, METER = "no meter", "meter"


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
                lines.append(Comparison(claims.POWER, None, f"{point.at['network']}: {point.facts[NO_METER]}"))
                continue
            for name in budgets_of(point):
                added = [100 * (value - 1) for value in relative(point, name, MEAN).rounds]
                lines.append(Comparison(claims.POWER, spread(added), f"{point.at['network']}, {name}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Energy is what the meter counted while a block of steps ran, over its steps. RAPL counts whole processor "
            "packages, so also what else they do; NVML counts the whole board.",
        ]
        for point in result.points:
            if NO_METER in point.facts:
                lines.append(
                    f"- {point.at['network']}: not measured, because this machine has no meter: {point.facts[NO_METER]}"
                )
            else:
                lines.append(f"- {point.at['network']}: {point.facts[METER]}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(result.title, 2, width=12.0)
        known = [point for point in result.points if NO_METER not in point.facts]
        for index, point in enumerate(known):
            names = budgets_of(point)
            places = [100 * point.values(name, BUDGET)[0] / point.facts["ideal peak MiB"] for name in names]
            for axes, quantity in zip(panels, (MEAN, ENERGY), strict=True):
                values = [relative(point, name, quantity) for name in names]
                charts.points_with_spread(axes, places, values, point.at["network"], index, line=True)
        for axes, label in zip(panels, ("average power (Figure 15)", "energy (Figure 16)"), strict=True):
            axes.set_xlabel("budget (% of the ideal peak)")
            axes.set_ylabel(f"{label} over unlimited")
            if known:
                axes.invert_xaxis()
                charts.even_line(axes, "unlimited")
                axes.legend(fontsize=8)
            else:
                axes.text(0.5, 0.5, "not measured:\nthis machine has no meter", ha="center", transform=axes.transAxes)
        charts.save(drawing, path)


def relative(point: Point, name: str, quantity: str) -> Spread:
    """A budget's value over the unlimited one, in each round."""
    pairs = zip(point.values(name, quantity), point.values(UNLIMITED, quantity), strict=True)
    return spread([ours / plain for ours, plain in pairs])
