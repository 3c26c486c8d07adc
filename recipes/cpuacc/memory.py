"""`cpuacc_memory`: what each way to add gradients up takes of a rank, and how many images fit in what it saves.

The paper's gradients were accumulated in buffers on the devices, which the host's take the place of. Ranks on cores
have one memory: here it is what gloo and DDP keep beside the gradients against a ring that all ranks share.
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

GROWN = "grown by"
MIB = 2**20
MORE_IMAGES = Claim("Sekiyama et al. 2017", "Introduction", "x", 1.1, "images of VGGNet-16 that fit, over Caffe")


class Memory(Recipe[AccumulationSettings]):
    """A point a network, number of ranks and batch size. A round is a start of fresh processes."""

    axes = ("cases", "rank_counts", "batch_sizes")
    quantity = GROWN

    def points(self, settings: AccumulationSettings) -> list[dict[str, Any]]:
        return [
            {"network": name, "ranks": ranks, "images": images}
            for name in settings.cases
            for ranks in settings.rank_counts
            for images in settings.batch_sizes
        ]

    def detail(self, settings: AccumulationSettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"case": settings.cases[at["network"]]}

    def references(self, point: Point) -> dict[str, str]:
        return {}

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        if settings.hardware.device != "cpu":
            raise ValueError(f"{settings.name} measures processes on a CPU: choose hardware=cpu")
        request = {**settings.cases[at["network"]], "job": "resident", "batch_size": at["images"]}
        request |= {"steps": settings.steps, "seed": settings.seed}
        grown: dict[str, list[float]] = {label: [] for label in settings.variants}
        parameters = 0
        for turn in range(settings.rounds):
            for label, strategy in settings.variants.items():
                answers = ask(settings, at["ranks"], {**request, "strategy": strategy}, tick)
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
                    at = f"{few.at['network']}, {few.at['ranks']} ranks, {many.at['images']} images"
                    lines.append(
                        Comparison(MORE_IMAGES, more_images(few, many, label, theirs), f"{at}: {label} over {theirs}")
                    )
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
            lines.append(
                f"- {few.at['network']}, {few.at['ranks']} ranks, {mib:.0f} MiB of parameters: MiB an image: {images}"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=4.2 * count, height=4.8, sharey=True)
        for axes, point in zip(panels, result.points, strict=True):
            labels = point.variants(GROWN)
            plain = point.values(labels[0], GROWN)
            for index, label in enumerate(labels):
                more = [mine - theirs for mine, theirs in zip(point.values(label, GROWN), plain, strict=True)]
                charts.points_with_spread(axes, [index], [spread(more)], None, index)
            where = f"{point.at['network']}, {point.at['ranks']} ranks, {point.at['images']} images"
            axes.set_title(f"{where}\n0: {labels[0]} with {spread(plain).median:.0f} MiB", fontsize=9)
            axes.axhline(0, color=charts.GREY, linewidth=1, linestyle="--")
            axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
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
