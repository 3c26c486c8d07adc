"""`cpuacc_table4`: Table 4: what each layer's gradients take to be brought, added up and taken back.

The paper's copies go over NVLink. Here a rank's gradients are in host memory already, so its copies are one into memory
that the ranks share and one out of it; the core on which the rank trains makes them, beside the backward pass.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from retime.foundations.measure import speedup, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Claim, Comparison, paper
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.targets import OnRanks, ask, machine, place
from retime.recipes.cpuacc.worker import ADD, BACKWARD, BRING, EXPOSED, QUANTITIES, TAKE

ALL, ALONE = "all layers", "backward alone"
COLUMNS = {BRING: "GPU-to-CPU copy", ADD: "accumulation on CPUs", TAKE: "CPU-to-GPU copy"}


def published() -> tuple[dict[str, list[float]], list[Claim]]:
    """Table 4, milliseconds of layers 8 to 1 by quantity; and what follows from it and from Table 3."""
    by_layer: dict[str, list[float]] = paper("cpuacc").tables["table-4"]
    whole = paper("cpuacc").tables["table-3"]
    claim = partial(Claim, "Sekiyama et al. 2017")
    added, in_all = sum(by_layer[ADD]), sum(sum(times) for times in by_layer.values())
    waited, slower = 100 * whole["exposed"] / in_all, whole["backward"] / whole["alone"]
    return by_layer, [
        claim("Tables 3 and 4", "x", added / whole["backward"], "accumulation of all layers over the backward pass"),
        claim("Tables 3 and 4", "%", waited, "of copies and accumulation the step waits for"),
        claim("Table 3", "x", slower, "backward pass with accumulation beside it over one without"),
    ]


class LayerTable(OnRanks):
    """A point a network and number of ranks; a variant a layer."""

    quantity = ADD
    on_cpu = "times copies by the host's clock"

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        answers = ask(settings, at, tick, "layers")
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
        facts = {"layers": named, "how": answers[0]["how"], **machine(settings, at["ranks"])}
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        table, totals = published()
        for point in result.points:
            where, labels = place(point), _layers(point)
            added, backward = point.values(ALL, ADD), point.values(ALL, BACKWARD)
            exposed = [100 * wait for wait in point.values(ALL, EXPOSED)]
            over = ((added, backward), (exposed, _work(point)), (backward, point.values(ALL, ALONE)))
            lines += [Comparison(claim, speedup(*pair), where) for claim, pair in zip(totals, over, strict=True)]
            if len(labels) == len(table[ADD]):
                for quantity, times in table.items():
                    for label, milliseconds in zip(labels, times, strict=True):
                        what = f"AlexNet, 4 P100, {label}: {COLUMNS[quantity]}"
                        claim = Claim("Sekiyama et al. 2017", "Table 4", "ms", milliseconds, what)
                        ours = point.spread(label, quantity)
                        lines.append(Comparison(claim, ours, f"{where}: {quantity}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Gradients are in host memory already: what stands for the paper's copies between GPU and CPU is a copy "
            "into memory that the ranks share (bring) and one out of it (take back). A rank brings what others add up, "
            "and adds up its own share of each layer. All of it is timed while the backward pass goes on, on the "
            "rank's own core: backward times hold it, and its times hold the turns in which the core went on with the "
            "backward pass. Wait: asleep until other ranks have done their part. Exposed: what of a layer's sum ran "
            "when the backward pass was over, waits included. A value is the slowest rank's."
        ]
        for point in result.points:
            lines.append(f"- {place(point)} on {point.facts['cores']} cores:")
            lines += [f"  - {label}: {what}" for label, what in point.facts["layers"].items()]
            lines.append(f"  - {exposure(point)}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count, (table, _) = len(result.points), published()
        drawing, panels = charts.panels(titled(result), count, width=6.5 * count)
        for axes, point in zip(panels, result.points, strict=True):
            labels = _layers(point)
            for index, quantity in enumerate((BACKWARD, BRING, ADD, TAKE, EXPOSED)):
                places = [number + 0.14 * (index - 2) for number in range(len(labels))]
                values = [point.spread(label, quantity) for label in labels]
                charts.points_with_spread(axes, places, values, quantity, index)
                if len(labels) == len(table[ADD]) and quantity in table:
                    theirs = [spread([time]) for time in table[quantity]]
                    charts.points_with_spread(axes, places, theirs, f"paper: {COLUMNS[quantity]}", index, filled=False)
            axes.set_yscale("symlog", linthresh=0.01)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{place(point)} on {point.facts['cores']} cores", fontsize=10)
            axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
            axes.set_ylabel("time (ms), linear below 0.01")
        charts.legend_below(drawing, panels[0], columns=4)
        charts.save(drawing, path)


def exposure(point: Point) -> str:
    """Answer of the point to the paper's claim that a step waits for the last layer's sum only."""
    labels = _layers(point)
    left = [label for label in labels if point.median(label, EXPOSED) > 0]
    verdict = "no more than the paper's last layer" if left in ([], labels[-1:]) else "more than the paper's last layer"
    work, whole = spread(_work(point)).median, point.median(ALL, EXPOSED)
    return (
        f"bringing, adding up and taking back took {work:.2f} ms; exposed were {whole:.2f} ms with waits, of "
        f"{', '.join(left) or 'no layer'}: {verdict}"
    )


def _layers(point: Point) -> list[str]:
    """Layers, as the backward pass goes."""
    return [label for label in point.variants(ADD) if label != ALL]


def _work(point: Point) -> list[float]:
    """Milliseconds of work for all layers, by round."""
    return [sum(times) for times in zip(*(point.values(ALL, quantity) for quantity in COLUMNS), strict=True)]


def _slowest(label: str, quantity: str, by_rank: list[list[float]]) -> Row:
    return Row(label, quantity, "ms", [round(max(times), 4) for times in zip(*by_rank, strict=True)])
