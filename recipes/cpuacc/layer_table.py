"""`cpuacc_table4`: Table 4: what each layer's gradients take to be brought, added up and taken back.

The paper's copies go over NVLink. Here a rank's gradients are in host memory already, so its copies are one into memory
that the ranks share and one out of it; the core on which the rank trains makes them, beside the backward pass.
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
from retime.recipes.cpuacc.layer_times import ADD, BACKWARD, BRING, EXPOSED, QUANTITIES, TAKE
from retime.recipes.cpuacc.targets import ask, cores

ALL, ALONE = "all layers", "backward alone"
PAPER = "Sekiyama et al. 2017"
TABLE = {  # milliseconds, layers 8 to 1
    BRING: (0.760, 3.156, 12.146, 0.133, 0.174, 0.275, 0.066, 0.014),
    ADD: (1.263, 4.441, 13.074, 0.285, 0.465, 0.578, 0.155, 0.018),
    TAKE: (1.786, 2.568, 5.538, 0.064, 0.095, 0.123, 0.041, 0.007),
}
COLUMNS = {BRING: "GPU-to-CPU copy", ADD: "accumulation on CPUs", TAKE: "CPU-to-GPU copy"}
_IN_ALL = sum(sum(times) for times in TABLE.values())
OF_BACKWARD = Claim(
    PAPER, "Tables 3 and 4", "x", sum(TABLE[ADD]) / 111, "accumulation of all layers over the backward pass"
)
WAITED = Claim(PAPER, "Tables 3 and 4", "%", 100 * 0.0218 / _IN_ALL, "of copies and accumulation the step waits for")
SLOWER = Claim(PAPER, "Table 3", "x", 111 / 104, "backward pass with accumulation beside it over one without")


class LayerTable(Recipe[AccumulationSettings]):
    """A point a network and number of ranks; a variant a layer."""

    axes = ("cases", "rank_counts")
    quantity = ADD

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
        labels = [f"layer {len(sizes) - number}" for number in range(len(sizes))]  # as the backward pass goes
        rows = []
        for quantity in QUANTITIES:
            by_rank = [answer["ms"][quantity] for answer in answers]
            for number, label in enumerate(labels):
                rows.append(_slowest(label, quantity, [[times[number] for times in rounds] for rounds in by_rank]))
            rows.append(_slowest(ALL, quantity, [[sum(times) for times in rounds] for rounds in by_rank]))
        rows.append(_slowest(ALL, ALONE, [answer["alone"] for answer in answers]))
        named = {label: f"{name}, {size:,} parameters" for label, (name, size) in zip(labels, sizes, strict=True)}
        return Measured(rows, {"layers": named, "how": answers[0]["how"], "cores": cores()})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            where = f"{point.at['network']}, {point.at['ranks']} ranks"
            labels = _layers(point)
            if not labels:
                continue
            added, backward = point.values(ALL, ADD), point.values(ALL, BACKWARD)
            exposed = [100 * wait for wait in point.values(ALL, EXPOSED)]
            lines += [
                Comparison(OF_BACKWARD, _ratio(added, backward), where),
                Comparison(WAITED, _ratio(exposed, _work(point)), where),
                Comparison(SLOWER, _ratio(backward, point.values(ALL, ALONE)), where),
            ]
            if len(labels) == len(TABLE[ADD]):
                lines += [
                    Comparison(
                        Claim(PAPER, "Table 4", "ms", published, f"AlexNet, 4 P100, {label}: {COLUMNS[quantity]}"),
                        spread(point.values(label, quantity)),
                        f"{where}: {quantity}",
                    )
                    for quantity, times in TABLE.items()
                    for label, published in zip(labels, times, strict=True)
                ]
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Gradients are in host memory already: what stands for the paper's copies between GPU and CPU is a copy "
            "into memory that the ranks share (bring) and one out of it (take back). A rank brings what others add up, "
            "and adds up its own share of each layer. All of it is timed while the backward pass goes on, on the "
            "rank's own core: backward times hold it, and its times hold the turns in which the core went on with the "
            "backward pass. Wait: asleep until other ranks have done their part. Exposed: what of a layer's sum ran "
            "when the backward pass was over, waits included. A value is the slowest rank's.",
        ]
        for point in result.points:
            lines.append(f"- {point.at['network']}, {point.at['ranks']} ranks on {point.facts['cores']} cores:")
            lines += [f"  - {label}: {what}" for label, what in point.facts["layers"].items()]
            if _layers(point):
                lines.append(f"  - {exposure(point)}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=6.5 * count)
        for axes, point in zip(panels, result.points, strict=True):
            labels = _layers(point)
            for index, quantity in enumerate((BACKWARD, BRING, ADD, TAKE, EXPOSED)):
                places = [number + 0.14 * (index - 2) for number in range(len(labels))]
                values = [spread(point.values(label, quantity)) for label in labels]
                charts.points_with_spread(axes, places, values, quantity, index)
                if len(labels) == len(TABLE[ADD]) and quantity in TABLE:
                    published = [Spread(time, time, time) for time in TABLE[quantity]]
                    label = f"paper: {COLUMNS[quantity]}"
                    charts.points_with_spread(axes, places, published, label, index, filled=False)
            axes.set_yscale("symlog", linthresh=0.01)
            axes.set_ylim(bottom=0)
            where = f"{point.at['network']}, {point.at['ranks']} ranks on {point.facts['cores']} cores"
            axes.set_title(where, fontsize=10)
            axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
            axes.set_ylabel("time (ms), linear below 0.01")
        charts.legend_below(drawing, panels[0], columns=4)
        charts.save(drawing, path)


def exposure(point: Point) -> str:
    """What the point says of the paper's claim that a step waits for the last layer's sum only."""
    labels = _layers(point)
    left = [label for label in labels if spread(point.values(label, EXPOSED)).median > 0]
    verdict = "no more than the paper's last layer" if left in ([], labels[-1:]) else "more than the paper's last layer"
    work, whole = spread(_work(point)).median, spread(point.values(ALL, EXPOSED)).median
    return (
        f"bringing, adding up and taking back took {work:.2f} ms; exposed were {whole:.2f} ms with waits, of "
        f"{', '.join(left) or 'no layer'}: {verdict}"
    )


def _layers(point: Point) -> list[str]:
    """As the backward pass goes; none in a point that was measured before sums told where their time goes."""
    return [label for label in point.variants(ADD) if label != ALL]


def _work(point: Point) -> list[float]:
    """Of all layers, by round."""
    return [sum(times) for times in zip(*(point.values(ALL, quantity) for quantity in TABLE), strict=True)]


def _slowest(label: str, quantity: str, by_rank: list[list[float]]) -> Row:
    return Row(label, quantity, "ms", [round(max(times), 4) for times in zip(*by_rank, strict=True)])


def _ratio(above: list[float], below: list[float]) -> Spread:
    return spread([one / other for one, other in zip(above, below, strict=True)])
