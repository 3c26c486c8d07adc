"""`cpuacc_update`: the optimizer's state once a machine against once a rank, and what a step takes.

moDNN, section 6.2 (Chen et al. 2018), where the host applies the update. On processors the ranks of a machine divide
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.measure import speedup, spread
from retime.recipes.core.of_points import titled
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import AccumulationSettings
from retime.recipes.cpuacc.targets import ask, cores
from retime.recipes.cpuacc.worker import GROWN, STATE, STEP

MIB = 2**20
SHARE = Target("optimizer state of the rank that holds most, over that of a rank under ddp / ranks", "x", 1.1, True)
MEMORY = Target("memory of the rank that grew most, over that under ddp", "x", 1.0, True)
SPEED = Target("steps per second over ddp", "x", 1.0)
ZERO = "ddp, ZeroRedundancyOptimizer"
"""torch's own way to divide the state, a strong peer: each rank updates its part and broadcasts the weights."""
ZERO_MEMORY = Target("memory of the rank that grew most, over that under ZeroRedundancyOptimizer", "x", 1.0, True)
ZERO_SPEED = Target("steps per second over ZeroRedundancyOptimizer", "x", 1.0)


class Updates(Recipe[AccumulationSettings]):
    """A point a network and number of ranks. A round is a start of fresh processes."""

    axes = ("cases", "rank_counts")
    quantity = STEP

    def points(self, settings: AccumulationSettings) -> list[dict[str, Any]]:
        return [{"network": name, "ranks": ranks} for name in settings.cases for ranks in settings.rank_counts]

    def detail(self, settings: AccumulationSettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"case": settings.cases[at["network"]]}

    def references(self, point: Point) -> dict[str, str]:
        first = point.variants(STEP)[0]
        return {f"speed over {first}": first}

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        if settings.hardware.device != "cpu":
            raise ValueError(f"{settings.name} trains on a CPU: choose hardware=cpu")
        request = {**settings.cases[at["network"]], "job": "held", "steps": settings.steps, "seed": settings.seed}
        found: dict[tuple[str, str], list[float]] = {}
        weights: dict[str, set[str]] = {}
        parameters = 0
        for turn in range(settings.rounds):
            for label, variant in settings.variants.items():
                own = {"optimizer": variant["optimizer"]} if "optimizer" in variant else {}
                strategy = {key: value for key, value in variant.items() if key != "optimizer"}
                answers = ask(settings, at["ranks"], {**request, **own, "strategy": strategy}, tick)
                for quantity, scale in ((STATE, MIB), (GROWN, MIB), (STEP, 1)):
                    most = max(answer[quantity] for answer in answers)
                    found.setdefault((quantity, label), []).append(round(most / scale, 4))
                weights.setdefault(label, set()).update(answer["weights"] for answer in answers)
                parameters = answers[0]["parameters"]
                tick(f"{label}, start {turn + 1}")
        units = {STATE: "MiB", GROWN: "MiB", STEP: "ms"}
        rows = [Row(label, quantity, units[quantity], values) for (quantity, label), values in found.items()]
        *_, ours = weights
        same = [label for label, digests in weights.items() if digests == weights[ours] and len(digests) == 1]
        return Measured(rows, {"parameters' bytes": parameters, "cores": cores(), "the same final weights": same})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            theirs, *_, ours = point.variants(STEP)
            where = f"{point.at['network']}, {point.at['ranks']} ranks: {ours} over {theirs}"
            share = [one / point.at["ranks"] for one in point.values(theirs, STATE)]
            lines += [
                Comparison(SHARE, speedup(point.values(ours, STATE), share), where),
                Comparison(MEMORY, speedup(point.values(ours, GROWN), point.values(theirs, GROWN)), where),
                Comparison(SPEED, speedup(point.values(theirs, STEP), point.values(ours, STEP)), where),
            ]
            if point.has(ZERO, STEP):
                lines += [
                    Comparison(ZERO_MEMORY, speedup(point.values(ours, GROWN), point.values(ZERO, GROWN)), where),
                    Comparison(ZERO_SPEED, speedup(point.values(ZERO, STEP), point.values(ours, STEP)), where),
                ]
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Values are those of the rank with most; a start is a fresh start of all ranks. Memory is what a process "
            "grew by until the end of a step, over what it was before the network was built. When the fit ends every "
            "rank gets the whole state again, which is not in it. On more than two ranks gloo adds up in another order."
        ]
        for point in result.points:
            mib = point.facts["parameters' bytes"] / MIB
            lines.append(
                f"- {point.at['network']}, {point.at['ranks']} ranks on {point.facts['cores']} cores: {mib:.0f} MiB of "
                f"parameters; the same final weights: {', '.join(point.facts['the same final weights'])}"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        quantities = ((STATE, "optimizer state of a rank (MiB)"), (GROWN, "a rank grows by (MiB)"), (STEP, "step (ms)"))
        count = len(result.points) * len(quantities)
        rows = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=10.5, height=4.2 * rows, rows=rows)
        places = [(point, *quantity) for point in result.points for quantity in quantities]
        for axes, (point, quantity, text) in zip(panels, places, strict=True):
            labels = point.variants(quantity)
            for index, label in enumerate(labels):
                charts.points_with_spread(axes, [index], [spread(point.values(label, quantity))], None, index)
            axes.set_ylim(0, 1.1 * max(max(point.values(label, quantity)) for label in labels))
            axes.set_title(f"{point.at['network']}, {point.at['ranks']} ranks", fontsize=9)
            axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
            axes.set_ylabel(text)
        charts.save(drawing, path)
