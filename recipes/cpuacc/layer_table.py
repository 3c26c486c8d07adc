"""`cpuacc_table4`: Table 4: by layer, how long its gradients take to be added up, beside its backward pass.

The paper's columns are a copy to the CPU, the accumulation, a copy back. Between processes on cores all three are one
turn through shared memory; the plain copy of the same bytes is measured beside, as what a copy alone would take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retime.recipes.core import charts
from retime.recipes.core.claims import Claim, Comparison
from retime.recipes.core.measure import Spread, spread
from retime.recipes.core.of_points import titled
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import AccumulationSettings
from retime.recipes.cpuacc.targets import ask, cores

BACKWARD, SUM, COPY, EXPOSED = "backward", "sum", "copy", "exposed"
ALL = "all layers"
PAPER = "Sekiyama et al. 2017"
_TO_CPU = (0.760, 3.156, 12.146, 0.133, 0.174, 0.275, 0.066, 0.014)
_ADDED = (1.263, 4.441, 13.074, 0.285, 0.465, 0.578, 0.155, 0.018)
_TO_GPU = (1.786, 2.568, 5.538, 0.064, 0.095, 0.123, 0.041, 0.007)
"""Milliseconds, layers 8 to 1."""
_IN_ALL = sum((*_TO_CPU, *_ADDED, *_TO_GPU))
OF_BACKWARD = Claim(
    PAPER, "Tables 3 and 4", "x", sum(_ADDED) / 111, "accumulation of all layers over the backward pass"
)
WAITED = Claim(PAPER, "Tables 3 and 4", "%", 100 * 0.0218 / _IN_ALL, "of copies and accumulation the step waits for")
SLOWER = Claim(PAPER, "Table 3", "x", 111 / 104, "backward pass with accumulation beside it over one without")


class LayerTable(Recipe[AccumulationSettings]):
    """A point a network and number of ranks; a variant a layer."""

    axes = ("cases", "rank_counts")
    quantity = SUM

    def points(self, settings: AccumulationSettings) -> list[dict[str, Any]]:
        return [{"network": name, "ranks": ranks} for name in settings.cases for ranks in settings.rank_counts]

    def detail(self, settings: AccumulationSettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"case": settings.cases[at["network"]]}

    def references(self, point: Point) -> dict[str, str]:
        return {}

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        if settings.hardware.device != "cpu":
            raise ValueError(f"{settings.name} runs on a CPU: choose hardware=cpu")
        request = {**settings.cases[at["network"]], "job": "layers"}
        request |= {key: getattr(settings, key) for key in ("rounds", "warmup_rounds", "seed")}
        answers = ask(settings, at["ranks"], request, tick)
        sizes = answers[0]["layers"]
        rows = []
        for number in reversed(range(len(sizes))):  # as the backward pass goes
            label = f"layer {number + 1}"
            for quantity in (BACKWARD, SUM, COPY):
                slowest = zip(*(answer["ms"][number][quantity] for answer in answers), strict=True)
                rows.append(Row(label, quantity, "ms", [round(max(values), 4) for values in slowest]))
        for quantity in (BACKWARD, EXPOSED):
            slowest = zip(*(answer["beside"][quantity] for answer in answers), strict=True)
            rows.append(Row(ALL, quantity, "ms", [round(max(values), 4) for values in slowest]))
        named = {f"layer {number + 1}": f"{name}, {size:,} parameters" for number, (name, size) in enumerate(sizes)}
        return Measured(rows, {"layers": named, "how": answers[0]["how"], "cores": cores()})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            where = f"{point.at['network']}, {point.at['ranks']} ranks"
            backward, sums = _over_layers(point, BACKWARD), _over_layers(point, SUM)
            beside, exposed = point.values(ALL, BACKWARD), point.values(ALL, EXPOSED)
            lines += [
                Comparison(
                    OF_BACKWARD, _ratio(sums, backward), f"{where}: turns through shared memory, copies included"
                ),
                Comparison(WAITED, _ratio([100 * wait for wait in exposed], sums), where),
                Comparison(SLOWER, _ratio(beside, backward), where),
            ]
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Each layer's gradients are summed alone for this table, with all ranks at once, and beside the backward "
            "pass for the row of all layers, where ranks add up on the cores that they train on. A value is that of "
            "the slowest rank. What a step waits for is also that the other ranks come to the end of theirs. A sum "
            "brings in each rank's gradients, adds them up and takes the result back.",
        ]
        for point in result.points:
            lines.append(f"- {point.at['network']}, {point.at['ranks']} ranks on {point.facts['cores']} cores:")
            lines += [f"  - {label}: {what}" for label, what in point.facts["layers"].items()]
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=6.0 * count)
        for axes, point in zip(panels, result.points, strict=True):
            labels = point.variants(SUM)
            for index, quantity in enumerate((BACKWARD, SUM, COPY)):
                values = [spread(point.values(label, quantity)) for label in labels]
                charts.points_with_spread(axes, range(len(labels)), values, _NAMES[quantity], index, line=True)
            axes.set_yscale("log")
            axes.set_title(f"{point.at['network']}, {point.at['ranks']} ranks", fontsize=10)
            axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
            axes.set_ylabel("time (ms)")
        charts.legend_below(drawing, panels[0], columns=3)
        charts.save(drawing, path)


_NAMES = {BACKWARD: "backward pass", SUM: "sum in shared memory", COPY: "plain copy"}


def _over_layers(point: Point, quantity: str) -> list[float]:
    """Of all layers together, by round."""
    labels = point.variants(SUM)
    return [sum(values) for values in zip(*(point.values(label, quantity) for label in labels), strict=True)]


def _ratio(above: list[float], below: list[float]) -> Spread:
    return spread([one / other for one, other in zip(above, below, strict=True)])
