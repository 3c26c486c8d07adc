"""`cpuacc_memory`: what each way to add gradients up takes of a rank, and how many images fit in what it saves.

The paper's gradients were accumulated in buffers on the devices, which the host's take the place of. Ranks on cores
have one memory: here it is what gloo and DDP keep beside the gradients against a ring that all ranks share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.targets import OnRanks, ask, claim, cores, place

GROWN = "grown by"
MIB = 2**20


class Memory(OnRanks):
    """A point a network, number of ranks and batch size. A round is a start of fresh processes."""

    over = (*OnRanks.over, ("images", "batch_sizes"))
    quantity = GROWN
    on_cpu = "measures processes on a CPU"

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        grown: dict[str, list[float]] = {label: [] for label in settings.variants}
        parameters = 0
        for turn in range(settings.rounds):
            for label, strategy in settings.variants.items():
                answers = ask(settings, at, tick, "resident", batch_size=at["images"], strategy=strategy)
                grown[label].append(round(max(answer["grown"] for answer in answers) / MIB, 2))
                parameters = answers[0]["parameters"]
                tick(f"{label}, start {turn + 1}")
        rows = [Row(label, GROWN, "MiB", values) for label, values in grown.items()]
        return Measured(rows, {"parameters' bytes": parameters, "cores": cores()})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for few, many in _pairs(result):
            for label in few.variants(GROWN):
                if label.startswith("cpu_accumulate"):
                    theirs = label.replace("cpu_accumulate_ddp", "ddp")
                    note = f"{place(few)}, {many.at['images']} images: {label} over {theirs}"
                    lines.append(Comparison(claim("images"), more_images(few, many, label, theirs), note))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "A value is by how much the largest rank's process grew at its peak in a short fit, over what it was "
            "before the network was built; each is a fresh start of all ranks. What an image takes is the difference "
            "between the two batch sizes over their distance; what a way saves of the other's memory at the larger "
            "batch is given to more images."
        ]
        for few, many in _pairs(result):
            mib = many.facts["parameters' bytes"] / MIB
            images = ", ".join(f"{label} {image_mib(few, many, label):.2f}" for label in few.variants(GROWN))
            lines.append(f"- {place(few)}, {mib:.0f} MiB of parameters: MiB an image: {images}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=4.2 * count, height=4.8, sharey=True)
        for axes, point in zip(panels, result.points, strict=True):
            first, *_ = labels = point.variants(GROWN)
            plain = point.values(first, GROWN)
            more = {
                label: spread([ours - theirs for ours, theirs in zip(point.values(label, GROWN), plain, strict=True)])
                for label in labels
            }
            charts.named(axes, more)
            where = f"{place(point)}, {point.at['images']} images"
            axes.set_title(f"{where}\n0: {first} with {spread(plain).median:.0f} MiB", fontsize=9)
            axes.axhline(0, color=charts.GREY, linewidth=1, linestyle="--")
        panels[0].set_ylabel("a rank's process grows by more (MiB)")
        charts.save(drawing, path)


def image_mib(few: Point, many: Point, label: str) -> float:
    """What an image more takes."""
    more = spread(many.values(label, GROWN)).median - spread(few.values(label, GROWN)).median
    return more / float(many.at["images"] - few.at["images"])


def more_images(few: Point, many: Point, ours: str, theirs: str) -> Spread:
    """Images that fit our way in what theirs takes at the larger batch, over that batch."""
    saved = [one - other for one, other in zip(many.values(theirs, GROWN), many.values(ours, GROWN), strict=True)]
    return spread([1 + mib / image_mib(few, many, ours) / many.at["images"] for mib in saved])


def _pairs(result: Result) -> list[tuple[Point, Point]]:
    """The points of the smallest and the largest batch, of each network and number of ranks."""
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in result.points:
        groups.setdefault((point.at["network"], point.at["ranks"]), []).append(point)
    ordered = [sorted(points, key=lambda point: int(point.at["images"])) for points in groups.values()]
    return [(points[0], points[-1]) for points in ordered if len(points) > 1]
