"""Section 3.6 of BPPSA: steps, work and memory of a backward scan on p workers, counted from the scan's plan.

Legend: n Jacobians, p workers. A step is one product, of two Jacobians or of one and a vector; the paper's machine
takes one unit for each.
"""

from collections import Counter
from math import log2
from pathlib import Path
from typing import Any

from rich.table import Table

from retime.mechanisms.scan import scan_plan
from retime.recipes.bppsa.settings import ScanPlanSettings
from retime.recipes.core import charts
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Result, Row

SCAN, LINEAR, PIPELINE = "scan", "linear scan", "pipeline"
STEPS, WORK, MEMORY = "steps", "products", "memory of a worker"
ORDER_OF_STEPS, ORDER_OF_WORK, ORDER_OF_MEMORY = "steps over n/p + log p", "products over n", "memory over max(n/p, 1)"


class ScanWorkers(Recipe[ScanPlanSettings]):
    """A point a number of Jacobians and of workers, up to one more worker than there are Jacobians."""

    over = (("n", "matrices"), ("p", "workers"))
    quantity = STEPS

    def points(self, settings: ScanPlanSettings) -> list[dict[str, Any]]:
        return [at for at in super().points(settings) if at["p"] <= at["n"] + 1]

    def measure(self, settings: ScanPlanSettings, at: dict[str, Any], tick: Tick) -> Measured:
        n, p = at["n"], at["p"]
        steps, work, kept = steps_on(n, p), len(scan_plan(n).steps), jacobians_kept(n, p)
        rows = [
            Row(SCAN, STEPS, "steps", [steps]),
            Row(SCAN, WORK, "products", [work]),
            Row(SCAN, MEMORY, "Jacobians", [kept]),
            Row(SCAN, ORDER_OF_STEPS, "times", [round(steps / order_of_steps(n, p), 4)]),
            Row(SCAN, ORDER_OF_WORK, "times", [round(work / n, 4)]),
            Row(SCAN, ORDER_OF_MEMORY, "times", [round(kept / max(n / p, 1), 4)]),
            Row(LINEAR, STEPS, "steps", [n]),
            Row(LINEAR, WORK, "products", [n]),
            # GPipe with re-materialisation: inputs of p micro-batches, and one stage's own activations (appendix B)
            Row(PIPELINE, MEMORY, "activations", [p + -(-n // p)]),
        ]
        return Measured(rows)

    def notes(self, result: Result) -> list[str]:
        sizes = {
            name: [point.values(SCAN, name)[0] for point in result.points]
            for name in (ORDER_OF_STEPS, ORDER_OF_WORK, ORDER_OF_MEMORY)
        }
        return [
            "Counted, nothing was measured. Products of one level of the plan begin together, as in Algorithm 1, so p "
            "workers need a p-th of their number, rounded up, for each level. Each worker owns n/p neighbouring "
            "Jacobians, rounded up; a product stays where its left factor is, and its right factor is received. A "
            "pipeline has as many micro-batches as workers and stores one activation a stage and micro-batch, and "
            "those of its own layers while it computes them again (appendix B).",
            *(f"- {name}: {min(each):.2f} to {max(each):.2f}, of {len(each)} points" for name, each in sizes.items()),
        ]

    def tables(self, result: Result) -> list[Table]:
        """One line a point."""
        table = Table("n", "p", "steps", "linear scan", "products", "Jacobians a worker", title=result.title)
        for point in result.points:
            cells = ((SCAN, STEPS), (LINEAR, STEPS), (SCAN, WORK), (SCAN, MEMORY))
            table.add_row(*map(str, point.at.values()), *(f"{point.values(*cell)[0]:g}" for cell in cells))
        return [table]

    def draw(self, result: Result, path: Path) -> None:
        drawing, (steps, memory) = charts.panels(result.title, 2, width=10.7, height=5.2)
        sizes = list(dict.fromkeys(point.at["n"] for point in result.points))
        for colour, n in zip(charts.COLOURS, sizes, strict=False):
            points = [point for point in result.points if point.at["n"] == n]
            places = [point.at["p"] for point in points]
            values = [point.values(SCAN, STEPS)[0] for point in points]
            steps.plot(places, values, "o-", color=colour, label=f"n = {n}", markersize=4, linewidth=1.2)
            steps.plot(places, [2 * order_of_steps(n, p) for p in places], ":", color=colour, linewidth=1)
            steps.plot(places[:1], [n], "_", color=colour, markersize=16, markeredgewidth=2)
        steps.set_ylabel("steps of the scan (dotted: 2 (n/p + log p); bar: linear scan)")
        for index, (variant, label) in enumerate(((SCAN, "scan: Jacobians"), (PIPELINE, "pipeline: activations"))):
            values = [point.values(variant, MEMORY)[0] for point in points]
            memory.plot(places, values, "os"[index] + "-", color=charts.COLOURS[index], label=label, markersize=4)
        memory.set_ylabel(f"kept by a worker, n = {sizes[-1]}")
        memory.legend(fontsize=8)
        for axes in (steps, memory):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            charts.plain_numbers(axes.yaxis)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("workers p")
        charts.legend_below(drawing, steps, 8)
        charts.save(drawing, path)


def order_of_steps(n: int, p: int) -> float:
    """Eq. 6 without its constants: log n for more workers than Jacobians, else n/p + log p."""
    return log2(n) if p > n else n / p + log2(p)


def steps_on(matrices: int, workers: int) -> int:
    """Steps of the scan, level by level, on so many workers."""
    products = Counter(step.level for step in scan_plan(matrices).steps)
    return sum(-(-count // workers) for count in products.values())


def jacobians_kept(matrices: int, workers: int) -> int:
    """The most Jacobians and products of them that a worker keeps at once, with the one that it receives."""
    plan = scan_plan(matrices)
    size = -(-matrices // workers)
    home = {number: (number - 1) // size for number in range(1, matrices + 1)}
    last_use = {number: step.result for step in plan.steps for number in (step.matrix, step.operand)}
    kept = Counter(home.values())
    most = max(kept.values())
    for step in plan.steps:
        worker = home[step.matrix]
        if not step.is_vector:
            kept[worker] += 1
            home[step.result] = worker
            most = max(most, kept[worker] + (home[step.operand] != worker))
        for number in (step.matrix, step.operand):
            if number in home and last_use[number] == step.result:
                kept[home[number]] -= 1
    return most
